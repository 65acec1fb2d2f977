// openai for Node: node openai_node.mjs URL MODEL FOLDER-WITH-node_modules NAME runs one of the tries
// below; what it finds wrong ends it.
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const [url, model, folder] = process.argv.slice(2);
const { OpenAI } = createRequire(`${folder}/package.json`)("openai");
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "-", maxRetries: 0 });
const fox = [{ role: "user", content: "Tell me a story about a fox." }];
const tool = {
  type: "function",
  function: {
    name: "get_weather",
    parameters: {
      type: "object",
      properties: { city: { type: "string", enum: ["Paris", "Oslo"] } },
      required: ["city"],
      additionalProperties: false,
    },
  },
};
const schema = {
  type: "object",
  properties: { happy: { type: "boolean" } },
  required: ["happy"],
  additionalProperties: false,
};
const greedy = { model, messages: fox, max_tokens: 16, temperature: 0 };

const tries = {
  async models() {
    const names = [];
    for await (const card of client.models.list()) names.push(card.id);
    assert.deepEqual(names, [model]);
  },
  async completions() {
    const found = await client.completions.create({
      model, prompt: "Once upon a time", max_tokens: 5, temperature: 0,
    });
    assert.equal(found.usage.completion_tokens, 5);
  },
  async embeddings() {
    const input = ["a fox", "a dog"];
    const asked = { model, input, dimensions: 16 };
    const packed = await client.embeddings.create(asked); // which asks for base64
    const plain = await client.embeddings.create({ ...asked, encoding_format: "float" });
    packed.data.forEach(({ embedding }, i) => {
      assert.equal(embedding.length, 16);
      embedding.forEach((value, j) =>
        assert.ok(Math.abs(value - plain.data[i].embedding[j]) < 1e-6));
    });
  },
  async "chat and its stream"() {
    const whole = await client.chat.completions.create(greedy);
    let text = "";
    let usage;
    const stream = await client.chat.completions.create({
      ...greedy, stream: true, stream_options: { include_usage: true },
    });
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, whole.choices[0].message.content);
    assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
  },
  async "stream helper"() {
    const runner = client.chat.completions.stream(greedy);
    let text = "";
    runner.on("content", (delta) => { text += delta; });
    const final = await runner.finalChatCompletion();
    assert.equal(final.choices[0].message.content, text);
  },
  async "a schema"() {
    const found = await client.chat.completions.parse({
      ...greedy, max_tokens: 60,
      response_format: { type: "json_schema", json_schema: { name: "it", strict: true, schema } },
    });
    assert.equal(typeof found.choices[0].message.parsed.happy, "boolean");
  },
  async tools() {
    const found = await client.chat.completions.create({
      ...greedy, tools: [tool], max_tokens: 60,
      tool_choice: { type: "function", function: { name: "get_weather" } },
    });
    const [call] = found.choices[0].message.tool_calls;
    assert.ok(["Paris", "Oslo"].includes(JSON.parse(call.function.arguments).city));
  },
  async responses() {
    const ask = { model, input: "Tell me a story about a fox.", max_output_tokens: 16, temperature: 0 };
    const whole = await client.responses.create(ask);
    let text = "";
    for await (const event of await client.responses.create({ ...ask, stream: true })) {
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    assert.equal((await client.responses.retrieve(whole.id)).id, whole.id);
  },
  async errors() {
    await assert.rejects(client.chat.completions.create({ ...greedy, temperature: -1 }),
      (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature");
    await assert.rejects(client.chat.completions.create({ ...greedy, model: "no-such" }),
      (error) => error instanceof OpenAI.NotFoundError);
  },
  async "going away"() {
    const stream = await client.chat.completions.create({
      ...greedy, max_tokens: 3000, ignore_eos: true, stream: true,
    });
    for await (const chunk of stream) {
      assert.ok(chunk.choices);
      break;
    }
    stream.controller.abort();
  },
};

const wanted = process.argv[5];
await tries[wanted]();
