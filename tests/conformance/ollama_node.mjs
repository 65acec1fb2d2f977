// ollama for Node: node ollama_node.mjs URL MODEL FOLDER-WITH-node_modules NAME runs one of the tries
// below; what it finds wrong ends it.
import { createRequire } from "node:module";
import assert from "node:assert/strict";

const [url, model, folder] = process.argv.slice(2);
const { Ollama } = createRequire(`${folder}/package.json`)("ollama");
const client = new Ollama({ host: url });
const messages = [{ role: "user", content: "Tell me a story about a fox." }];
const options = { temperature: 0, num_predict: 16 };

const tries = {
  async "chat and its stream"() {
    const whole = await client.chat({ model, messages, options });
    let text = "";
    let last;
    for await (const part of await client.chat({ model, messages, options, stream: true })) {
      text += part.message.content;
      last = part;
    }
    assert.equal(text, whole.message.content);
    assert.deepEqual([last.eval_count, last.done_reason], [16, "length"]);
  },
  async "prompt and its stream"() {
    const prompt = messages[0].content;
    const whole = await client.generate({ model, prompt, options });
    let text = "";
    for await (const part of await client.generate({ model, prompt, options, stream: true })) {
      text += part.response;
    }
    assert.equal(text, whole.response);
  },
  async vectors() {
    const found = await client.embed({ model, input: ["a fox", "a dog", "a fox"] });
    const [first, second, third] = found.embeddings;
    assert.deepEqual(first, third);
    assert.notDeepEqual(first, second);
    assert.ok(Math.abs(Math.hypot(...first) - 1) < 1e-3 && found.prompt_eval_count > 3);
  },
  async models() {
    assert.equal((await client.list()).models[0].name, `${model}:latest`);
    assert.ok(new Date((await client.ps()).models[0].expires_at) > new Date());
    assert.ok((await client.show({ model })).capabilities.includes("completion"));
    assert.match((await client.version()).version, /^\d+\.\d+\.\d+$/);
  },
  async pull() {
    let last;
    for await (const part of await client.pull({ model, stream: true })) last = part;
    assert.equal(last.status, "success");
  },
  async errors() {
    await assert.rejects(client.chat({ model: "llama3", messages }), { status_code: 404 });
    await assert.rejects(client.chat({ model, messages, options: { mirostat: 1 } }),
      /options\.mirostat/);
  },
  async abort() {
    const stream = await client.chat({
      model, messages, options: { num_predict: 2000 }, stream: true,
    });
    await assert.rejects(async () => {
      for await (const part of stream) if (part) stream.abort();
    }, { name: "AbortError" });
  },
};

await tries[process.argv[5]]();
