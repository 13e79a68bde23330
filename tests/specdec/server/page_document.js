// A document that is just enough for the page to run in node, and a server whose replies a test gives.
"use strict";
const { readFileSync } = require("node:fs");

class Element {
  constructor(name) {
    Object.assign(this, { name, children: [], attributes: {}, dataset: {}, listeners: {}, className: "", hidden: false, disabled: false });
    Object.assign(this, { value: "", checked: false, parent: null, own: "", scrollTop: 0, clientHeight: 0, scrollHeight: 0, title: "" });
    this.classList = {
      toggle: (word, force) => {
        const words = new Set(this.className.split(" ").filter(Boolean));
        if (force) words.add(word); else words.delete(word);
        this.className = [...words].join(" ");
      },
    };
  }
  get textContent() { return this.own + this.children.map((child) => child.textContent).join(""); }
  set textContent(text) { this.children = []; this.own = String(text); }
  appendChild(child) { child.parent = this; this.children.push(child); return child; }
  replaceChildren(...children) { this.own = ""; this.children = []; children.forEach((child) => this.appendChild(child)); }
  remove() { this.parent.children = this.parent.children.filter((child) => child !== this); }
  setAttribute(name, value) { this.attributes[name] = String(value); }
  addEventListener(kind, call) { (this.listeners[kind] ||= []).push(call); }
  focus() {}
  /** Let an event happen here and at the elements around. */
  happen(kind, more = {}) {
    const event = { target: this, preventDefault() {}, ...more };
    for (let each = this; each; each = each.parent) (each.listeners[kind] || []).forEach((call) => call(event));
  }
  /** Return all elements below that have a class. */
  all(word) {
    return this.children.flatMap((child) => [...(child.className.split(" ").includes(word) ? [child] : []), ...child.all(word)]);
  }
  /** Return markup of what is below, as far as tests look at it. */
  get markup() {
    return this.children.length ? this.children.map((child) => {
      const words = child.className ? `.${child.className.replace(/ /g, ".")}` : "";
      return child.name === "span" && /^(piece)?$/.test(child.className) ? child.markup : `<${child.name}${words}>${child.markup}</${child.name}>`;
    }).join("") : this.own;
  }
}

/** Run the page; return its elements by id, the bodies of its requests, and `send` and `settle`. */
function openPage(html, replies, recorded) {
  const ids = Object.fromEntries([...html.matchAll(/<(\w+)[^>]*\bid="([^"]+)"[^>]*>/g)].map((found) => {
    const element = new Element(found[1]);
    element.value = (/\bvalue="([^"]*)"/.exec(found[0]) || ["", ""])[1];
    element.checked = /\bchecked\b/.test(found[0]);
    element.hidden = /\bhidden\b/.test(found[0]);
    return [found[2], element];
  }));
  if (recorded) (ids.recorded = new Element("script")).own = JSON.stringify(recorded);
  const document = {
    getElementById: (id) => ids[id] || null, createElement: (name) => new Element(name), createElementNS: (_, name) => new Element(name),
    createDocumentFragment: () => new Element("fragment"), querySelectorAll: () => [],
  };
  const bodies = [];
  const fetch = async (path, { body, signal }) => {
    if (path === "v1/models") return { ok: true, json: async () => ({ data: [{ id: "tiny" }] }) };
    bodies.push(JSON.parse(body));
    const reply = replies.shift();
    if (reply === "gone") throw new TypeError("fetch failed");
    if (reply.status) return { ok: false, status: reply.status, json: async () => ({ error: reply.error }) };
    const encoder = new TextEncoder(), parts = [...reply.parts];
    const read = async () => {
      if (parts.length) return { done: false, value: encoder.encode(parts.shift()) };
      if (reply.ends === "broken") throw new TypeError("network error");
      if (reply.ends === "never") await new Promise((_, fail) => signal.addEventListener("abort", () => fail(Object.assign(new Error("aborted"), { name: "AbortError" }))));
      return { done: true };
    };
    return { ok: true, body: { getReader: () => ({ read }) } };
  };
  const script = html.match(/<script>([^]*)<\/script>/)[1];
  const names = "{ parseMarkdown, splitByPieces, figuresOf, compared, endOf }";
  const functions = new Function("document", "fetch", `${script}; return ${names}`)(document, fetch);
  const settle = () => new Promise((done) => setTimeout(done, 20));
  const send = async (text) => {
    ids.message.value = text;
    ids.form.happen("submit");
    await settle();
  };
  return { ...functions, ids, bodies, send, settle };
}

/** Return a step that gives this text, with drafts or without. */
function step(text, accepted = [], seconds = 0.01, plain_seconds = 0.01) {
  const nodes = accepted.map((taken, index) => ({ token: index, text: "x", parent: index - 1, value: -1, target_prob: 0.5, accepted: taken }));
  const taken = nodes.filter((node) => node.accepted).map(({ token }) => ({ token, text: "x", accepted: true }));
  const output = [...taken, { token: 9, text: "y", accepted: false }];
  return { seconds, plain_seconds, root: { token: 1, text: "r", accepted: false }, nodes, output, pieces: [{ text, accepted: taken.length > 0 }] };
}

/** Return a stream's parts: its steps, then its end. */
function partsOf(steps, finish_reason, completion_tokens) {
  const event = (data) => `data: ${JSON.stringify(data)}\n\n`;
  const parts = steps.map((one) => event({ choices: [{ delta: { content: one.pieces[0].text }, trace: [one], finish_reason: null }], usage: null }));
  if (finish_reason) parts.push(event({ choices: [{ delta: {}, finish_reason }] }), event({ choices: [], usage: { completion_tokens } }), "data: [DONE]\n\n");
  return parts;
}

const html = readFileSync(process.argv[2], "utf8");
require("node:vm").runInThisContext(`(async (html, openPage, step, partsOf) => {${readFileSync(process.argv[3], "utf8")}})`)(
  html, openPage, step, partsOf,
).then((found) => console.log(JSON.stringify(found)));
