// Vercel's AI SDK: node ai_sdk.mjs URL MODEL FOLDER-WITH-node_modules PROVIDER NAME... runs the tries below
// that are named, and prints what each found wrong (null: nothing) as one object. The model is made to write
// what a try needs by fields that `fetch` adds to the requests: nothing of the SDK sees them.
import { createRequire } from "node:module";
import assert from "node:assert/strict";
import { inspect } from "node:util";

const [url, model, folder, provider, ...wanted] = process.argv.slice(2);
globalThis.AI_SDK_LOG_WARNINGS = false;
const load = createRequire(`${folder}/package.json`);
const { generateText, streamText, generateObject, tool, Output, stepCountIs, ToolLoopAgent } = load("ai");
const { z } = load("zod");

const sent = [];
let script = () => ({});
const refused = [];

// One request: its body is kept, and gets the fields of the script.
async function recording(where, options) {
  const body = JSON.parse(options.body);
  sent.push(body);
  const answer = await fetch(where, {
    ...options, body: JSON.stringify({ ...body, ...script(sent.length - 1, body) }),
  });
  if (!answer.ok) refused.push(await answer.clone().text());
  return answer;
}

const base = { apiKey: "-", baseURL: `${url}/v1`, fetch: recording };
const makers = {
  chat: () => load("@ai-sdk/openai").createOpenAI(base).chat(model),
  responses: () => load("@ai-sdk/openai").createOpenAI(base).responses(model),
  unkept: () => load("@ai-sdk/openai").createOpenAI(base).responses(model),
  compatible: () => load("@ai-sdk/openai-compatible").createOpenAICompatible({
    ...base, name: "actorium", includeUsage: true, supportsStructuredOutputs: true,
  })(model),
  anthropic: () => load("@ai-sdk/anthropic").createAnthropic(base)(model),
};
const ask = {
  model: makers[provider](), maxRetries: 0, temperature: 0, maxOutputTokens: 400,
  prompt: "Tell me a story about a fox.",
  // Without a store the SDK sends the items themselves, else references to them.
  ...(provider === "unkept" && { providerOptions: { openai: { store: false } } }),
};

// The tokens that begin a call and end a thought.
const { LESS_THAN, THOUGHT_END } = process.env;
// A bias for or against calls, where a text or an object may come as well.
const calling = (bias) => ({ logit_bias: { [LESS_THAN]: bias } });
// Ends a thought behind a few words.
const ends = { logit_bias: { [THOUGHT_END]: 12, [LESS_THAN]: -100 } };
// The fields that make the model write this text and end, behind a thought if there is one.
const says = (text) => ({
  ...ends, temperature: 0,
  regex: [...text].map((one) => one.replace(/[^A-Za-z0-9 ]/u, (mark) =>
    `\\x{${mark.codePointAt(0).toString(16)}}`)).join(""),
});
const callText = (name, args) =>
  `One moment.\n<tool_call>\n${JSON.stringify({ name, arguments: args })}\n</tool_call>`;
const turns = (...each) => (at) => each[Math.min(at, each.length - 1)];
const callThenText = () => turns(says(callText("weather", { city: "Riga", days: 2 })), says("It is cold."));

const city = z.enum(["Riga", "Oslo"]);
const asked = [];
const weather = tool({
  description: "The weather of a city.",
  inputSchema: z.object({
    city, days: z.number().int().min(1).max(7).optional(), note: z.string().max(8).nullable().optional(),
  }),
  execute: async (input) => { asked.push(input); return { celsius: 5, sky: "grey" }; },
});
const mood = z.object({ happy: z.boolean(), colour: z.enum(["red", "blue"]) });

async function collected(result) {
  const kinds = [];
  let text = "";
  for await (const part of result.stream) {
    kinds.push(part.type);
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") text += part.text;
  }
  return { kinds, text };
}

function looped(steps, text) {
  assert.equal(steps.length, 2);
  const [call] = steps[0].toolCalls;
  assert.deepEqual([call.toolName, call.input], ["weather", { city: "Riga", days: 2 }]);
  assert.equal(steps[0].finishReason, "tool-calls");
  assert.equal(steps[0].text.trim(), "One moment.");
  assert.deepEqual(steps[0].toolResults[0].output, { celsius: 5, sky: "grey" });
  assert.deepEqual(asked, [{ city: "Riga", days: 2 }]);
  assert.equal(text, "It is cold.");
  assert.equal(steps[1].finishReason, "stop");
  for (const step of steps) assert.ok(step.usage.inputTokens > 0 && step.usage.outputTokens > 0);
  // The engine has read what went before.
  assert.ok(steps[1].usage.inputTokens > steps[0].usage.inputTokens);
}

const tries = {
  async text() {
    const short = { ...ask, maxOutputTokens: 24 };
    const whole = await generateText(short);
    assert.equal(whole.finishReason, "length");
    const result = streamText(short);
    const { text } = await collected(result);
    assert.ok(text.length > 10);
    assert.equal(text, whole.text);
    assert.deepEqual([(await result.usage).outputTokens, whole.usage.outputTokens], [24, 24]);
  },
  async "a loop of calls"() {
    script = callThenText();
    const { steps, text } = await generateText({ ...ask, tools: { weather }, stopWhen: stepCountIs(3) });
    looped(steps, text);
  },
  async "a streamed loop of calls"() {
    script = callThenText();
    const result = streamText({ ...ask, tools: { weather }, stopWhen: stepCountIs(3) });
    const { kinds } = await collected(result);
    for (const kind of ["tool-input-start", "tool-input-delta", "tool-input-end", "tool-call", "tool-result"]) {
      assert.ok(kinds.includes(kind), `no ${kind} in ${kinds}`);
    }
    looped(await result.steps, await result.text);
  },
  async "an agent of three turns"() {
    script = turns(says(callText("weather", { city: "Riga", days: 2 })),
      says(callText("weather", { city: "Oslo" })), says("Both are cold."));
    const agent = new ToolLoopAgent({ ...ask, prompt: undefined, instructions: "Be brief.", tools: { weather } });
    const { steps, text } = await agent.generate({ prompt: ask.prompt });
    assert.deepEqual([steps.length, text], [3, "Both are cold."]);
    assert.deepEqual(asked.map((one) => one.city), ["Riga", "Oslo"]);
    assert.ok(steps[2].usage.inputTokens > steps[1].usage.inputTokens);
  },
  async "two calls at once"() {
    const [first, second] = ["Riga", "Oslo"].map((name) => callText("weather", { city: name }));
    script = turns(says(`${first}\n${second.replace("One moment.\n", "")}`), says("It is cold."));
    const { steps } = await generateText({ ...ask, tools: { weather }, stopWhen: stepCountIs(3) });
    assert.deepEqual(steps[0].toolResults.map((one) => one.input.city), ["Riga", "Oslo"]);
  },
  async "a required call"() {
    const { toolCalls } = await generateText({ ...ask, tools: { weather }, toolChoice: "required" });
    const [call] = toolCalls;  // there may be more, the last one cut off
    assert.ok(!call.invalid && ["Riga", "Oslo"].includes(call.input.city));
  },
  async "a named call"() {
    const other = tool({ inputSchema: z.object({}), execute: async () => "no" });
    const result = streamText({
      ...ask, tools: { other, weather }, toolChoice: { type: "tool", toolName: "weather" },
    });
    await collected(result);
    const [call] = await result.toolCalls;
    assert.deepEqual([call.toolName, call.invalid], ["weather", undefined]);
  },
  async "a conversation that goes on"() {
    script = callThenText();
    const messages = [{ role: "user", content: ask.prompt }];
    const first = await generateText({ ...ask, prompt: undefined, messages, tools: { weather }, stopWhen: stepCountIs(3) });
    script = () => says("Take a coat.");
    const second = await generateText({
      ...ask, prompt: undefined, tools: { weather },
      messages: [...messages, ...first.responseMessages, { role: "user", content: "And what do I wear?" }],
    });
    assert.equal(second.text, "Take a coat.");
    assert.ok(second.usage.inputTokens > first.steps.at(-1).usage.inputTokens);
  },
  async "a refused call"() {
    // The model's arguments do not fit: the SDK tells it so, and the next turn holds them as they were.
    script = turns(says(callText("weather", { city: "Atlantis" })), says("It is cold."));
    const { steps, text } = await generateText({ ...ask, tools: { weather }, stopWhen: stepCountIs(3) });
    assert.ok(steps[0].toolCalls[0].invalid);
    assert.equal(text, "It is cold.");
  },
  async "an object"() {
    const { object } = await generateObject({ ...ask, schema: mood });
    assert.ok(mood.safeParse(object).success);
  },
  async "an object of text"() {
    const { output } = await generateText({ ...ask, output: Output.object({ schema: mood }) });
    assert.ok(mood.safeParse(output).success);
  },
  async "a streamed object"() {
    const result = streamText({ ...ask, output: Output.object({ schema: mood }) });
    await collected(result);
    assert.ok(mood.safeParse(await result.output).success);
  },
  async "a choice"() {
    const { output } = await generateText({ ...ask, output: Output.choice({ options: ["sunny", "rainy"] }) });
    assert.ok(["sunny", "rainy"].includes(output));
  },
  async "an object beside tools, called"() {
    script = turns(calling(100), calling(-100));
    const { steps, output } = await generateText({
      ...ask, tools: { weather }, output: Output.object({ schema: mood }), stopWhen: stepCountIs(3),
    });
    assert.equal(steps[0].toolCalls[0]?.toolName, "weather");
    assert.ok(mood.safeParse(output).success);
  },
  async "an object beside tools, at once"() {
    script = turns(calling(-100));
    const { steps, output } = await generateText({
      ...ask, tools: { weather }, output: Output.object({ schema: mood }), stopWhen: stepCountIs(3),
    });
    assert.equal(steps.length, 1);
    assert.ok(mood.safeParse(output).success);
  },
  async "an object beside a required call"() {
    const { toolCalls } = await generateText({
      ...ask, tools: { weather }, toolChoice: "required", output: Output.object({ schema: mood }),
    });
    assert.equal(toolCalls[0].toolName, "weather");
  },
  async "zod's schemas"() {
    const place = z.discriminatedUnion("kind", [
      z.object({ kind: z.literal("town"), name: z.string().max(8) }),
      z.object({ kind: z.literal("point"), at: z.tuple([z.number().int(), z.number().int()]) }),
    ]);
    const shapes = {
      place, maybe: z.string().max(4).nullable(), whole: z.int(), tags: z.array(z.enum(["a", "b"])).max(2),
      when: z.iso.datetime(), id: z.uuid(), one: z.union([z.boolean(), z.literal(3)]),
    };
    for (const [name, shape] of Object.entries(shapes)) {
      const schema = z.object({ [name]: shape });
      const { toolCalls } = await generateText({
        ...ask, tools: { it: tool({ inputSchema: schema }) }, toolChoice: { type: "tool", toolName: "it" },
      });
      assert.ok(schema.safeParse(toolCalls[0].input).success, `${name}: ${JSON.stringify(toolCalls[0].input)}`);
    }
  },
  async "zod's annotations"() {
    // Formats and records that most engines cannot hold; a tool's description is no reason to refuse.
    const inputSchema = z.object({
      link: z.url().optional(), bytes: z.base64().optional(), phone: z.e164().optional(), token: z.jwt().optional(),
      words: z.record(z.string(), z.string()).optional(), all: z.any().optional(), mail: z.email().optional(),
    });
    const it = tool({ inputSchema, execute: async () => "done" });
    script = turns(says(callText("it", { words: { a: "b" } })), says("It is cold."));
    const { steps, text } = await generateText({ ...ask, tools: { it }, stopWhen: stepCountIs(3) });
    assert.deepEqual([steps[0].toolCalls[0].input, text], [{ words: { a: "b" } }, "It is cold."]);
    script = () => ({});
    const forced = await generateText({ ...ask, tools: { it }, toolChoice: "required" });
    assert.equal(forced.toolCalls[0].toolName, "it");
  },
  async abort() {
    const stop = new AbortController();
    script = () => ({ ignore_eos: true });
    const result = streamText({ ...ask, maxOutputTokens: 3000, abortSignal: stop.signal });
    const kinds = [];
    for await (const part of result.stream) {
      kinds.push(part.type);
      if (part.type === "text-delta") stop.abort();
    }
    assert.equal(kinds.at(-1), "abort");
  },
  async errors() {
    await assert.rejects(generateText({ ...ask, temperature: -1 }),
      (error) => error.statusCode === 400 && error.message.includes("temperature"));
  },
};

// With an engine whose template begins a thought.
const thinking = {
  anthropic: { temperature: undefined, providerOptions: {
    anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } } } },
  unkept: { providerOptions: { openai: { store: false, forceReasoning: true, reasoningSummary: "auto" } } },
  responses: { providerOptions: { openai: { forceReasoning: true, reasoningSummary: "auto" } } },
}[provider] ?? {};
// Anthropic's API has no format: the SDK makes a tool of it, which nothing forces while thinking.
const answers = (name, args) => provider === "anthropic" ? says(callText(name, args)) : {};
const thoughts = {
  async "a thought"() {
    script = () => ({ ...ends, temperature: 0 });
    const whole = await generateText({ ...ask, ...thinking, maxOutputTokens: 60 });
    assert.ok(whole.reasoningText.length > 3);
    assert.ok(whole.text.length > 3);
    const result = streamText({ ...ask, ...thinking, maxOutputTokens: 60 });
    const { kinds, text } = await collected(result);
    assert.ok(kinds.indexOf("reasoning-delta") < kinds.indexOf("text-delta"));
    assert.deepEqual([await result.reasoningText, text], [whole.reasoningText, whole.text]);
  },
  async "a thought and a loop of calls"() {
    script = callThenText();
    const { steps, text } = await generateText({
      ...ask, ...thinking, tools: { weather }, stopWhen: stepCountIs(3),
    });
    assert.ok(steps[0].reasoningText.length > 3);
    looped(steps, text);
  },
  async "a thought and an object"() {
    script = () => ({ ...answers("json", { happy: true, colour: "red" }), ...ends });
    const { reasoningText, output } = await generateText({
      ...ask, ...thinking, output: Output.object({ schema: mood }),
    });
    assert.ok(reasoningText.length > 3);
    assert.ok(mood.safeParse(output).success);
  },
  async "a thought and a required call"() {
    script = () => ({ ...answers("weather", { city: "Riga" }), ...ends });
    const { reasoningText, toolCalls } = await generateText({
      ...ask, ...thinking, tools: { weather }, toolChoice: "required",
    });
    assert.ok(reasoningText.length > 3);
    assert.equal(toolCalls[0].toolName, "weather");
  },
};

const wrong = {};
for (const name of wanted) {
  sent.length = refused.length = asked.length = 0;
  script = () => ({});
  try {
    await (tries[name] ?? thoughts[name])();
    wrong[name] = null;
  } catch (error) {
    wrong[name] = `${inspect(error).slice(0, 1500)}\nrefused: ${refused}\nsent: ${JSON.stringify(sent).slice(-1500)}`;
  }
}
console.log(JSON.stringify(wrong));
