// Streams an answer into the page; without this file the form posts and waits for the whole answer.
(function () {
  "use strict";
  const { $ } = window.Sardeenz;
  const form = $("[data-playground]");
  if (!form) return;
  const box = $("#chat");
  const prompt = $("#prompt");
  const send = $("[data-send]", form);
  const stop = $("[data-stop]", form);
  const history = JSON.parse(form.elements.history.value || "[]");
  let running = null;

  function bubble(kind, text) {
    const empty = $("[data-chat-empty]", box);
    if (empty) empty.remove();
    const line = document.createElement("div");
    line.className = "bubble " + kind;
    const who = document.createElement("span");
    who.className = "visually-hidden";
    who.textContent = kind + ": ";
    const words = document.createElement("span");
    words.textContent = text;
    line.append(who, words);
    box.append(line);
    box.scrollTop = box.scrollHeight;
    return { line, words };
  }

  function busy(on) {
    send.disabled = on;
    stop.hidden = !on;
    box.setAttribute("aria-busy", on ? "true" : "false");
  }

  // Calls onEvent with the JSON of each "data:" line.
  async function readEvents(response, onEvent) {
    const reader = response.body.getReader();
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const text = line.trim();
        if (!text.startsWith("data:")) continue;
        const data = text.slice(5).trim();
        if (data === "[DONE]") return;
        onEvent(JSON.parse(data));
      }
    }
  }

  async function ask() {
    const text = prompt.value.trim();
    if (!text || running) return;
    bubble("user", text);
    history.push({ role: "user", content: text });
    prompt.value = "";
    busy(true);
    const answer = bubble("assistant", "");
    const foot = document.createElement("footer");
    const started = performance.now();
    let first = 0;
    let tokens = 0;
    let content = "";
    running = new AbortController();
    const field = (name) => (form.elements[name] ? form.elements[name].value.trim() : "");
    const system = field("system");
    try {
      const response = await fetch("/playground/chat/", {
        method: "POST",
        headers: {
          "Content-Type": "application/json",
          ...JSON.parse(document.body.getAttribute("hx-headers")),
        },
        body: JSON.stringify({
          model: field("model"),
          messages: system ? [{ role: "system", content: system }, ...history] : history,
          temperature: field("temperature"),
          max_tokens: field("max_tokens"),
        }),
        signal: running.signal,
      });
      if (!response.ok) {
        const error = await response.json().catch(() => ({}));
        throw new Error(error.error || "The server could not do that (" + response.status + ").");
      }
      await readEvents(response, (event) => {
        if (event.error) throw new Error(event.error.message || String(event.error));
        const delta = event.choices && event.choices[0] && event.choices[0].delta;
        const piece = delta && (delta.content || delta.reasoning_content || delta.reasoning);
        if (piece) {
          if (!first) first = performance.now();
          tokens += 1;
          content += piece;
          const stuck = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
          answer.words.textContent = content;
          if (stuck) box.scrollTop = box.scrollHeight;
        }
        if (event.usage && event.usage.completion_tokens) tokens = event.usage.completion_tokens;
      });
      history.push({ role: "assistant", content });
    } catch (error) {
      if (error.name === "AbortError") {
        foot.textContent = "Stopped. ";
        if (content) history.push({ role: "assistant", content });
        else history.pop();
      } else {
        if (!content) {
          answer.line.remove();
          history.pop();
          prompt.value = text;
        }
        bubble("error", error.message).line.setAttribute("role", "alert");
      }
    }
    const seconds = (performance.now() - (first || started)) / 1000;
    if (first && tokens) {
      foot.textContent +=
        "first token " + ((first - started) / 1000).toFixed(2) + " s, " + tokens + " tokens, " +
        (seconds > 0 ? (tokens / seconds).toFixed(1) : "–") + " tokens/s";
      answer.line.append(foot);
    }
    form.elements.history.value = JSON.stringify(history);
    running = null;
    busy(false);
    prompt.focus();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    ask();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
      event.preventDefault();
      ask();
    }
  });
  stop.addEventListener("click", () => running && running.abort());
  window.addEventListener("pagehide", () => running && running.abort());
})();
