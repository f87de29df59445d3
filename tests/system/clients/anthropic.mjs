// One turn with a tool through Anthropic's client: node anthropic.mjs URL

import Anthropic from "@anthropic-ai/sdk";

const client = new Anthropic({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const request = {
  model: "chat-model",
  max_tokens: 100,
  tools: [{ name: "weather", description: "Of a city.", input_schema: schema }],
};
const messages = [{ role: "user", content: "Paris?" }];
const first = await client.messages.create({ ...request, messages });
const call = first.content.find((block) => block.type === "tool_use");
const result = { type: "tool_result", tool_use_id: call.id, content: "18 degrees" };
messages.push({ role: "assistant", content: first.content }, { role: "user", content: [result] });
const last = await client.messages.stream({ ...request, messages }).finalMessage();
console.log(JSON.stringify({ called: call.input, text: last.content[0].text }));
