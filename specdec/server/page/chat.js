// The page: a chat, or one recorded answer.

function start() {
  const at = (id) => document.getElementById(id);
  let messages = [], answers = [], running = null, opened = null, traces = true, isNamed = false;

  function openStep(answer, number) {
    const step = answer.steps[number];
    if (opened && opened !== answer) opened.choose(-1);
    opened = answer;
    answer.choose(number);
    const accepted = step.nodes.filter((node) => node.accepted).length;
    at("title").textContent = `${answer.passes.includes(number) ? "Pass over the prompt" : `Step ${number}`}: ${step.nodes.length} draft tokens, `
      + `${accepted} accepted, ${step.output.length} tokens in ${(1000 * step.seconds).toFixed(1)} ms`;
    at("drawing").replaceChildren(drawTree(step));
  }

  function newAnswer() {
    answers.push(new Answer(at("chat"), openStep));
    return answers[answers.length - 1];
  }

  async function ask(path, body, signal) {
    const headers = { "Content-Type": "application/json" };
    // The key is in this field and nowhere else.
    if (at("key").value) headers.Authorization = `Bearer ${at("key").value}`;
    let reply;
    try {
      reply = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
    } catch (error) {
      throw error.name === "AbortError" ? error : new Error(`The server does not answer. ${REMEDY}`);
    }
    if (reply.ok) return reply;
    const told = await reply.json().catch(() => ({}));
    const message = told.error ? told.error.message : `the server answers ${reply.status}`;
    throw Object.assign(new Error(message), { status: reply.status, param: told.error && told.error.param });
  }

  function bodyOf(limit) {
    const body = {
      messages, stream: true, stream_options: { include_usage: true }, temperature: Number(at("temperature").value), max_tokens: limit,
      speculation: { enabled: at("drafts").checked },
    };
    if (messages[messages.length - 1].role === "assistant") {
      body.continue_final_message = true;
      body.add_generation_prompt = false;
    }
    if (at("seed").value) body.seed = Number(at("seed").value);
    if (traces) body.trace = true;
    return body;
  }

  async function request(limit, signal) {
    try {
      return await ask("v1/chat/completions", bodyOf(limit), signal);
    } catch (error) {
      if (error.param !== "trace") throw error;
      traces = false;
      return ask("v1/chat/completions", bodyOf(limit), signal);
    }
  }

  /** Show the stream of an answer; return its finish reason and number of tokens, as far as they came. */
  async function read(reply, answer) {
    const decoder = new TextDecoder(), reader = reply.body.getReader(), ended = { reason: null, tokens: 0 };
    // Speed is that of the steps after the first part.
    const before = answer.seconds;
    let began = 0, text = "", isFirst = true;
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === "AbortError") throw error;
        return ended;
      }
      if (part.done) return ended;
      const found = readEvents(text + decoder.decode(part.value, { stream: true }));
      text = found.rest;
      const follow = at("chat").scrollTop + at("chat").clientHeight >= at("chat").scrollHeight - 40;
      for (const event of found.events) {
        if (event.error) throw new Error(event.error.message);
        if (event.usage) ended.tokens = event.usage.completion_tokens;
        for (const choice of event.choices) {
          for (const step of choice.trace || []) {
            answer.addStep(step, isFirst);
            isFirst = false;
          }
          const { reasoning, content } = choice.delta;
          if (reasoning) answer.addThought(reasoning);
          // Steps hold all text, and what they have brought of the answer comes behind its thinking.
          if (content) answer.endThinking(traces ? content.length : 0);
          if (!traces) answer.addText(content);
          ended.reason = choice.finish_reason ?? ended.reason;
        }
      }
      answer.show(at("markdown").checked);
      if (began && traces) answer.showFigures(answer.seconds = before + (performance.now() - began) / 1000);
      began = began || performance.now();
      if (follow) at("chat").scrollTop = at("chat").scrollHeight;
    }
  }

  /** Let the server answer the conversation, or go on with its last answer. */
  async function run(answer) {
    const chat = messages, limit = Number(at("max-tokens").value) || 256, own = new AbortController();
    running = own;
    at("send").hidden = true;
    at("stop").hidden = false;
    answers.forEach((each) => each.showEnd(null));
    let end = null;
    try {
      const { reason, tokens } = await read(await request(limit, own.signal), answer);
      end = endOf(reason, tokens, limit, false);
      if (!isNamed) showModel();
    } catch (error) {
      if (error.name === "AbortError") end = endOf(null, 0, limit, true);
      // What has come can go on once the cause is mended.
      else end = { text: error.message, goesOn: Boolean(answer.said), isError: true };
      if (error.status === 401) at("key-label").hidden = false;
    }
    if (answer.said && chat[chat.length - 1].role === "assistant") chat[chat.length - 1].content = answer.said;
    else if (answer.said) {
      const reasoning = answer.thinking.textContent;
      chat.push({ role: "assistant", content: answer.said, ...(reasoning && { reasoning }) });
    }
    // A new chat may have begun since, and a later answer with it.
    if (chat === messages) {
      answer.showEnd(end, () => { if (!running) run(answer); });
      if (!answer.said) at("message").value = chat.pop().content;
    }
    if (running !== own) return;
    running = null;
    at("send").hidden = false;
    at("stop").hidden = true;
    at("message").focus();
  }

  async function send() {
    const content = at("message").value.trim();
    if (!content || running) return;
    add(at("chat"), "div", "user", content);
    messages.push({ role: "user", content });
    at("message").value = "";
    await run(newAnswer());
  }

  /** Show a recorded answer instead of a chat. */
  function showRecorded(recorded) {
    document.querySelectorAll(".live").forEach((element) => { element.hidden = true; });
    at("model").textContent = recorded.model;
    add(at("chat"), "div", "user", recorded.prompt);
    const answer = newAnswer();
    recorded.steps.forEach((step, number) => answer.addStep(step, number === 0));
    answer.show(at("markdown").checked);
    answer.showFigures(recorded.steps.slice(1).reduce((sum, step) => sum + step.seconds, 0));
    answer.showEnd(recorded.end ? { text: recorded.end, goesOn: false } : null);
    const drafted = recorded.steps.findIndex((step) => step.nodes.some((node) => node.accepted));
    if (recorded.steps.length) openStep(answer, Math.max(drafted, 0));
  }

  async function showModel() {
    try {
      const { data } = await (await ask("v1/models")).json();
      at("model").textContent = data[0].id;
      isNamed = true;
    } catch (error) {
      if (error.status === 401) at("key-label").hidden = false;
      at("model").textContent = error.message;
    }
  }

  at("markdown").addEventListener("change", () => answers.forEach((answer) => answer.show(at("markdown").checked)));
  const recorded = at("recorded");
  if (recorded) {
    showRecorded(JSON.parse(recorded.textContent));
    return;
  }
  at("form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  at("message").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); }
  });
  at("stop").addEventListener("click", () => running && running.abort());
  at("key").addEventListener("change", showModel);
  at("new").addEventListener("click", () => {
    if (running) running.abort();
    messages = [];
    answers = [];
    opened = null;
    at("chat").replaceChildren();
    at("drawing").replaceChildren();
  });
  showModel();
}

if (typeof document !== "undefined") start();
