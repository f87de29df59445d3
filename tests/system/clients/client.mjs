// What OpenAI's client for Node makes of a router: node client.mjs URL. Prints one JSON object.
import OpenAI from "openai";

const client = new OpenAI({ baseURL: process.argv[2] + "/v1", apiKey: "none", maxRetries: 0 });
const model = (await client.models.list()).data[0].id;
const seen = { model };

const completion = { model, prompt: "def main(", max_tokens: 20, seed: 3 };
seen.completion = (await client.completions.create(completion)).choices[0].text;
seen.streamedCompletion = "";
for await (const chunk of await client.completions.create({ ...completion, stream: true })) {
  seen.streamedCompletion += chunk.choices[0].text;
}

const chat = { model, messages: [{ role: "user", content: "Add two numbers." }], max_completion_tokens: 20, seed: 3 };
seen.chat = (await client.chat.completions.create(chat)).choices[0].message.content;
seen.streamedChat = "";
const chunks = await client.chat.completions.create({ ...chat, stream: true, stream_options: { include_usage: true } });
for await (const chunk of chunks) {
  seen.streamedChat += chunk.choices[0]?.delta.content ?? "";
  seen.usage = chunk.usage;
}

const response = { model, input: "Add two numbers.", max_output_tokens: 20, seed: 3 };
seen.response = (await client.responses.create(response)).output_text;
seen.streamedResponse = "";
for await (const event of await client.responses.create({ ...response, stream: true })) {
  if (event.type === "response.output_text.delta") seen.streamedResponse += event.delta;
}

try {
  await client.chat.completions.create({ ...chat, temperature: 5 });
} catch (error) {
  seen.error = { status: error.status, param: error.param, name: error.constructor.name };
}
console.log(JSON.stringify(seen));
