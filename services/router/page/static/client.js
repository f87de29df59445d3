// Calls of this page's own router. A typed-in key is kept until the tab is closed.

const KEY = "outrider-key";

export const saveKey = (key) => sessionStorage.setItem(KEY, key);

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Returns the response to one call. Throws Refused on an error status.
export async function call(path, body = undefined, signal = undefined) {
  const headers = {};
  const key = sessionStorage.getItem(KEY);
  if (key) headers.authorization = `Bearer ${key}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  const method = body === undefined ? "GET" : "POST";
  const response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  if (!response.ok) {
    const answer = await response.json().catch(() => null);
    throw new Refused(response.status, answer?.error?.message ?? `the router answers ${response.status}`);
  }
  return response;
}

// Yields the server-sent events of a response: {name, data}. (EventSource can send neither a key nor a body.)
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      text += value;
      const parts = text.split("\n\n");
      text = parts.pop();
      for (const part of parts) {
        const event = { name: "message", data: "" };
        for (const line of part.split("\n")) {
          if (line.startsWith("event: ")) event.name = line.slice(7);
          if (line.startsWith("data: ")) event.data += line.slice(6);
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
