// Markdown of an answer as ranges of its text, so that each character keeps its step and colour. Pure functions.
//
// Known are headings, lists, quotes, rules, fenced code, tables as they are, and within a line code, strong and emphasis.
// Everything else, links and HTML among it, stays text.

const FENCE = /^[ \t]*(`{3,}|~{3,})[ \t]*([^`\n]*)$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const ITEM = /^([ \t]*)([-*+]|\d{1,9}[.)])[ \t]+/;
const QUOTE = /^ {0,3}>[ \t]?/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
// Characters within which a mark is to be closed, so that a line of many marks takes no long time.
const REACH = 1000;

/**
 * Return the blocks of a text: {kind, runs, level, mark}, runs of ranges {start, end, style} in their order.
 * A block that is not the last does not change as the text grows.
 */
function parseMarkdown(text) {
  const blocks = [];
  let at = 0, open = null;
  while (at < text.length) {
    const newline = text.indexOf("\n", at), end = newline < 0 ? text.length : newline, line = text.slice(at, end);
    const fence = FENCE.exec(line), next = end + 1;
    if (fence) {
      const code = codeAt(text, next, fence[1]);
      blocks.push({ kind: "code", level: 0, mark: fence[2].trim(), runs: code.end > next ? [{ start: next, end: code.end, style: "" }] : [] });
      at = code.next;
      open = null;
      continue;
    }
    const found = lineOf(line);
    const goesOn = open && found.kind === open.kind && ["paragraph", "quote", "table"].includes(open.kind);
    const lazy = open && found.kind === "paragraph" && open.kind === "item" && /^[ \t]/.test(line);
    if (goesOn || lazy) open.ranges.push([at + found.skip, end]);
    else if (found.kind === "empty") open = null;
    else blocks.push(open = { kind: found.kind, level: found.level, mark: found.mark, ranges: [[at + found.skip, end]] });
    at = next;
  }
  return blocks.map((block) => (block.ranges ? withRuns(text, block) : block));
}

/** Return the end of fenced code that begins here, and where the text goes on. Code that is not closed yet has no end. */
function codeAt(text, from, fence) {
  for (let at = from; at < text.length;) {
    const newline = text.indexOf("\n", at), end = newline < 0 ? text.length : newline, line = text.slice(at, end).trim();
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) return { end: Math.max(from, at - 1), next: end + 1 };
    at = end + 1;
  }
  return { end: text.length, next: text.length + 1 };
}

/** Return the kind of a line, and how many characters of markup it begins with. */
function lineOf(line) {
  let found;
  if (!line.trim()) return { kind: "empty", skip: 0, level: 0, mark: "" };
  if ((found = HEADING.exec(line))) return { kind: "heading", skip: found[0].length, level: found[1].length, mark: "" };
  if (RULE.test(line)) return { kind: "rule", skip: line.length, level: 0, mark: "" };
  if ((found = ITEM.exec(line))) {
    const mark = /\d/.test(found[2]) ? found[2] : "•";
    return { kind: "item", skip: found[0].length, level: Math.min(4, Math.floor(found[1].replace(/\t/g, "    ").length / 2)), mark };
  }
  if ((found = QUOTE.exec(line))) return { kind: "quote", skip: found[0].length, level: 0, mark: "" };
  if (/^ {0,3}\|/.test(line)) return { kind: "table", skip: 0, level: 0, mark: "" };
  return { kind: "paragraph", skip: 0, level: 0, mark: "" };
}

/** Return a block with its runs. Lines stay lines, as most models mean them. */
function withRuns(text, { kind, level, mark, ranges }) {
  const runs = [];
  ranges.forEach(([start, end], index) => {
    // The line's end belongs to the line before.
    if (index) runs.push({ start: ranges[index - 1][1], end: ranges[index - 1][1] + 1, style: "" });
    runs.push(...(kind === "table" || kind === "rule" ? [{ start, end, style: "" }] : inlineRuns(text, start, end, "")));
  });
  return { kind, level, mark, runs: runs.filter((run) => run.end > run.start) };
}

/** Return the runs of a range within a line; styles are words of "strong", "em" and "code". */
function inlineRuns(text, start, end, style) {
  const runs = [];
  let from = start, at = start;
  const close = (until) => { if (until > from) runs.push({ start: from, end: until, style }); };
  while (at < end) {
    const inner = markedAt(text, at, end);
    if (inner) {
      close(at);
      if (inner.word === "code") runs.push({ start: inner.start, end: inner.end, style: joined(style, "code") });
      else runs.push(...inlineRuns(text, inner.start, inner.end, inner.word.split(" ").reduce(joined, style)));
      from = at = inner.next;
    } else if (text[at] === "\\" && at + 1 < end && PUNCTUATION.test(text[at + 1])) {
      close(at);
      from = at + 1;
      at += 2;
    } else at += sameFrom(text, at, end);
  }
  close(end);
  return runs;
}

function joined(style, word) {
  return style.split(" ").includes(word) ? style : `${style} ${word}`.trim();
}

/** Return the length of the run of one markup character, so that what opens nothing is passed over whole; else 1. */
function sameFrom(text, at, end) {
  let length = 1;
  if ("`*_".includes(text[at])) while (at + length < end && text[at + length] === text[at]) length++;
  return length;
}

/** Return the marked range that begins here: {word, start, end, next}, null if none does. */
function markedAt(text, at, end) {
  const char = text[at];
  if (!"`*_".includes(char)) return null;
  const length = sameFrom(text, at, end), start = at + length;
  if (char !== "`") {
    const isWithin = char === "_" && at > 0 && /[\p{L}\p{N}]/u.test(text[at - 1]);
    if (length > 3 || start >= end || /\s/.test(text[start]) || isWithin) return null;
  }
  for (let close = start; close < Math.min(end, start + REACH);) {
    if (char !== "`" && text[close] === "\\") { close += 2; continue; }
    if (char !== "`" && text[close] === "`") {
      const code = markedAt(text, close, end);
      close = code ? code.next : close + sameFrom(text, close, end);
      continue;
    }
    if (text[close] !== char) { close++; continue; }
    const found = sameFrom(text, close, end);
    const isWithin = char === "_" && close + found < end && /[\p{L}\p{N}]/u.test(text[close + found]);
    if (char === "`" && found === length) return { word: "code", start, end: close, next: close + length };
    // Three may end what began with fewer, and what is within it, as in **a *b***.
    if (char !== "`" && (found === length || found === 3) && !/\s/.test(text[close - 1]) && !isWithin) {
      return { word: ["em", "strong", "strong em"][length - 1], start, end: close + found - length, next: close + found };
    }
    close += found;
  }
  return null;
}

/** Return the lines of a text as blocks without markup. */
function parsePlain(text) {
  const blocks = [];
  for (let start = 0; start < text.length;) {
    const newline = text.indexOf("\n", start), end = newline < 0 ? text.length : newline + 1;
    blocks.push({ kind: "line", level: 0, mark: "", runs: [{ start, end, style: "" }] });
    start = end;
  }
  return blocks;
}

/** Return the parts of a run by the pieces of text that it lies in: {start, end, piece}, piece an index. */
function splitByPieces(run, pieces) {
  let low = 0, high = pieces.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (pieces[middle].end <= run.start) low = middle + 1;
    else high = middle;
  }
  const parts = [];
  for (let piece = low; piece < pieces.length && pieces[piece].start < run.end; piece++) {
    parts.push({ start: Math.max(run.start, pieces[piece].start), end: Math.min(run.end, pieces[piece].end), piece });
  }
  return parts;
}
