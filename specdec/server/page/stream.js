"use strict";
// What the server sends, and words for it. Pure functions: no document, no network.

/** Split the text of server-sent events into their data, and the rest that is not complete yet. */
function readEvents(text) {
  const parts = text.split("\n\n");
  const rest = parts.pop();
  const data = parts.flatMap((part) => part.split("\n").filter((line) => line.startsWith("data: ")));
  return { events: data.map((line) => line.slice(6)).filter((line) => line !== "[DONE]").map((line) => JSON.parse(line)), rest };
}

// The time of fewer steps tells more of what else the machine did.
const LEAST_STEPS = 8;

/**
 * Return tokens, steps, tau and speed-up of an answer. Passes over the prompt, given by their numbers, are no steps of these.
 * The speed-up is the time that steps without drafts would have taken for the same tokens over the time of the steps.
 * It is null without drafts, of few steps, and where the server has not measured what steps cost.
 */
function figuresOf(steps, passes = [0]) {
  const later = steps.filter((_, number) => !passes.includes(number));
  const sum = (some, value) => some.reduce((total, step) => total + value(step), 0);
  const tokens = sum(steps, (step) => step.output.length), ofLater = sum(later, (step) => step.output.length);
  const isKnown = later.length >= LEAST_STEPS && later.some((step) => step.nodes.length) && later.every((step) => step.plain_seconds !== null);
  const without = sum(later, (step) => step.output.length * step.plain_seconds);
  return {
    tokens, steps: later.length, tau: later.length ? ofLater / later.length : 0, later: ofLater,
    speedup: isKnown ? without / sum(later, (step) => step.seconds) : null,
  };
}

/** Return how an answer's speed compares with that without drafts, as words; nothing where it is not known. */
function compared(speedup) {
  if (speedup === null || !Number.isFinite(speedup)) return "";
  const factor = speedup < 1 ? 1 / speedup : speedup;
  if (factor < 1.05) return "about as fast as without drafts";
  return `about ${factor.toFixed(1)} times ${speedup < 1 ? "slower" : "faster"} than without drafts`;
}

/**
 * Return what is to be said of how an answer ended, and whether it can go on; null if it is complete.
 * The reason is the API's finish_reason, null where none came.
 */
function endOf(reason, tokens, limit, isStopped) {
  if (isStopped) return { text: "Stopped.", goesOn: true };
  if (reason === "length" && tokens < limit) return { text: "Cut: the context is full. A new chat begins with an empty one.", goesOn: false };
  if (reason === "length") return { text: `Cut at ${limit} tokens, the limit above (max tokens).`, goesOn: true };
  if (reason === "abort") return { text: "The server has ended the answer.", goesOn: true };
  return reason === null ? { text: `The connection broke before the answer's end. ${REMEDY}`, goesOn: true } : null;
}

const REMEDY = "If the server has ended, its log says why; start it again with specdec serve, and go on here.";

/** Return a probability as text; of null, a dash. */
function percent(chance) {
  if (chance === null || chance === undefined) return "–";
  return chance >= 0.0995 ? `${(100 * chance).toFixed(0)}%` : chance >= 0.0005 ? `${(100 * chance).toFixed(1)}%` : "<0.1%";
}

/** Return a token's text with visible white space, of limited length. */
function shown(text, token, most = 16) {
  if (text === null) return `#${token}`;
  const visible = text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·");
  return visible.length > most ? `${visible.slice(0, most - 1)}…` : visible;
}
