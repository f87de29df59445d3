// The page's own prompt, and its answer with every token marked by its kind.

import { call, events } from "./client.js";
import { byId, element, formatNumber, formatShare } from "./dom.js";
import { KINDS, kindsOf } from "./rounds.js";

const QUESTION = "What is the capital of France, and what is it known for?";

export class Prompt {
  // `failed` is called with each error's message and status.
  constructor(failed) {
    this.failed = failed;
    this.form = byId("prompt-form");
    this.output = byId("answer");
    this.summary = byId("answer-summary");
    this.stop = byId("prompt-stop");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    this.stop.addEventListener("click", () => this.asking?.abort());
    byId("prompt-text").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  welcome({ model, has_chat: hasChat, is_bundled: isBundled, max_speculative_tokens: maxDepth }) {
    const kind = byId("prompt-kind");
    kind.querySelector("[value=chat]").disabled = !hasChat;
    const text = byId("prompt-text");
    // Only replaces an unedited text, and only at the first of several connections.
    // The bundled model only completes code.
    if (hasChat && !isBundled && !this.model && text.value === text.defaultValue) {
      text.value = QUESTION;
      kind.value = "chat";
    }
    this.model = model;
    if (maxDepth) byId("prompt-k").max = maxDepth;
  }

  get body() {
    const field = (name) => byId(`prompt-${name}`).value.trim();
    const text = byId("prompt-text").value;
    const isChat = field("kind") === "chat";
    const body = {
      model: this.model,
      ...(isChat ? { messages: [{ role: "user", content: text }] } : { prompt: text }),
      max_tokens: Number(field("length")),
      temperature: Number(field("temperature")),
      stream: true,
      return_rounds: true,
    };
    if (field("seed") !== "") body.seed = Number(field("seed"));
    if (field("k") !== "") body.num_speculative_tokens = Number(field("k"));
    return [isChat ? "v1/chat/completions" : "v1/completions", body];
  }

  async ask() {
    this.asking?.abort();
    const asking = (this.asking = new AbortController());
    const [path, body] = this.body;
    const counts = { tokens: 0, drafted: 0, accepted: 0, rounds: 0, steps: 0, seed: null, reason: "" };
    this.output.replaceChildren();
    this.output.setAttribute("aria-busy", "true");
    this.summary.textContent = "";
    this.summary.setAttribute("aria-live", "off"); // read out once, at the end
    this.stop.disabled = false;
    this.failed("");
    let [firstAt, numFirst] = [null, 0];
    try {
      for await (const event of events(await call(path, body, asking.signal))) {
        if (event.data === "[DONE]") break;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Error(chunk.error.message);
        counts.seed = chunk.seed;
        const [choice] = chunk.choices;
        this.add(choice.rounds ?? [], counts);
        if (firstAt === null) [firstAt, numFirst] = [performance.now(), counts.tokens];
        counts.reason = choice.finish_reason ?? counts.reason;
        this.tell(counts, counts.tokens - numFirst, (performance.now() - firstAt) / 1e3);
      }
    } catch (error) {
      if (error.name !== "AbortError") this.failed(error.message, error.status);
    } finally {
      if (this.asking === asking) {
        this.stop.disabled = true;
        this.summary.setAttribute("aria-live", "polite");
        this.summary.textContent = String(this.summary.textContent); // a change, so that screen readers read it
        this.output.setAttribute("aria-busy", "false");
      }
    }
  }

  add(rounds, counts) {
    const isAtEnd = this.output.scrollTop + this.output.clientHeight > this.output.scrollHeight - 8;
    for (const { num_draft_tokens: drafted, num_accepted_tokens: accepted, tokens } of rounds) {
      const kinds = kindsOf(drafted, accepted, tokens.length);
      tokens.forEach((text, index) => {
        // Blanks before a word have a fainter line, which separates the words.
        const blanks = text.length - text.trimStart().length;
        for (const [part, more] of [[text.slice(0, blanks), " blank"], [text.slice(blanks), ""]]) {
          const attributes = { class: kinds[index] + more, title: KINDS[kinds[index]] };
          if (part) this.output.append(element("span", attributes, part));
        }
      });
      counts.tokens += tokens.length;
      counts.steps += 1;
      counts.drafted += drafted;
      counts.accepted += accepted;
      counts.rounds += drafted > 0;
    }
    if (isAtEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  // `numSince` tokens arrived in `seconds` after the first chunk.
  tell({ tokens, drafted, accepted, rounds, steps, seed, reason }, numSince, seconds) {
    const parts = [`${tokens} tokens in ${steps} steps`];
    if (seconds > 0.05) parts.push(`${formatNumber(numSince / seconds, 0)} tokens/s`);
    if (rounds) parts.push(`${formatShare(accepted / drafted)} of the drafts accepted`);
    if (rounds) parts.push(`${formatNumber(1 + accepted / rounds)} tokens per round`);
    parts.push(`seed ${seed}`);
    if (reason) parts.push(`ended: ${reason}`);
    this.summary.textContent = parts.join(" · ");
  }
}
