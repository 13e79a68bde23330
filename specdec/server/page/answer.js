// An answer on the page: its text, the control of its steps, its figures and its end. Text of the model becomes text
// nodes only.

const TAGS = { strong: "strong", em: "em", code: "code" };
const WIDTH = 142, HEIGHT = 38, GAP_X = 22, GAP_Y = 10;
const SVG = "http://www.w3.org/2000/svg";

/** Add an element to another and return it. */
function add(parent, name, classes, text) {
  const element = document.createElement(name);
  if (classes) element.className = classes;
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

/** Add an element of a drawing to another and return it. */
function draw(parent, name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return parent.appendChild(element);
}

/** Return the drawing of a step's tree. */
function drawTree(step) {
  const { boxes, lines } = placeTree(step);
  const depth = Math.max(...boxes.map((box) => box.depth));
  const left = (box) => 1 + box.depth * (WIDTH + GAP_X), top = (box) => 1 + box.line * (HEIGHT + GAP_Y);
  const size = { width: 2 + (depth + 1) * (WIDTH + GAP_X) - GAP_X, height: 2 + lines * (HEIGHT + GAP_Y) };
  const svg = draw(document.createDocumentFragment(), "svg", { ...size, role: "img", "aria-label": "Draft tree" });
  for (const box of boxes.slice(1)) {
    const parent = boxes[box.parent];
    draw(svg, "line", { class: box.kind, x1: left(parent) + WIDTH, y1: top(parent) + HEIGHT / 2, x2: left(box), y2: top(box) + HEIGHT / 2 });
  }
  for (const box of boxes) {
    const group = draw(svg, "g", { class: box.kind });
    draw(group, "rect", { x: left(box), y: top(box), width: WIDTH, height: HEIGHT, rx: 5 });
    draw(group, "text", { x: left(box) + 6, y: top(box) + 16 }, box.kind === "accepted" ? `${box.text} ✓` : box.text);
    draw(group, "text", { class: "numbers", x: left(box) + 6, y: top(box) + 31 }, box.numbers);
  }
  return svg;
}

/** An answer that gets text and steps, and shows them once `show` is called. */
class Answer {
  /** `open(answer, number)` is called when the user chooses a step. */
  constructor(parent, open) {
    this.block = add(parent, "div");
    // What the model thinks first, folded.
    this.thoughts = add(this.block, "details", "thinking");
    this.thoughts.hidden = true;
    add(this.thoughts, "summary", "", "Thinking");
    this.thinking = add(this.thoughts, "div", "");
    this.isThinking = false;
    this.text = add(this.block, "div", "answer");
    this.steps = [];
    // Numbers of the steps that are passes over the prompt: the first of each part.
    this.passes = [];
    this.content = "";
    // Pieces of the text: {start, end, step, accepted}; step -1 where the server tells no steps.
    this.pieces = [];
    // Shown blocks of the text: {key, element, spans}.
    this.shown = [];
    this.chosen = -1;
    // Time of its parts so far, without their passes over the prompt.
    this.seconds = 0;
    this.strip = add(this.block, "div", "steps");
    this.strip.hidden = true;
    const button = (label, by) => {
      const element = add(this.strip, "button", "", label);
      element.type = "button";
      element.title = by < 0 ? "Step before" : "Next step";
      element.addEventListener("click", () => open(this, Math.min(Math.max(this.chosen + by, 0), this.steps.length - 1)));
      return element;
    };
    this.before = button("◀", -1);
    this.slider = add(this.strip, "input");
    this.slider.type = "range";
    this.slider.min = "0";
    this.slider.max = "0";
    this.slider.value = "0";
    this.slider.setAttribute("aria-label", "Step");
    this.slider.addEventListener("input", () => open(this, Number(this.slider.value)));
    this.next = button("▶", 1);
    this.place = add(this.strip, "span", "place");
    this.line = add(this.block, "div", "figures");
    this.end = add(this.block, "div", "end");
    this.end.hidden = true;
    this.text.addEventListener("click", (event) => {
      const step = Number(event.target.dataset.step ?? -1);
      if (step >= 0) open(this, step);
    });
  }

  addText(text, step = -1, accepted = false) {
    if (!text) return;
    this.pieces.push({ start: this.content.length, end: this.content.length + text.length, step, accepted });
    this.content += text;
  }

  addThought(text) {
    this.thinking.textContent += text;
    this.thoughts.hidden = false;
    this.isThinking = true;
  }

  /** Take the thinking out of the text, whose end of this length is the beginning of the answer. */
  endThinking(length) {
    if (!this.isThinking) return;
    const begin = this.content.length - length;
    this.isThinking = false;
    this.content = this.content.slice(begin);
    this.pieces = this.pieces.filter(({ end }) => end > begin)
      .map(({ start, end, ...rest }) => ({ ...rest, start: Math.max(start - begin, 0), end: end - begin }));
  }

  /** What the model has said behind its thinking. */
  get said() { return this.isThinking ? "" : this.content; }

  addStep(step, isPass) {
    const number = this.steps.push(step) - 1;
    if (isPass) this.passes.push(number);
    for (const piece of step.pieces) this.addText(piece.text, number, piece.accepted);
  }

  /** Show the text, as markdown or as it is. Blocks that have not changed stay as they are. */
  show(isMarkdown) {
    const blocks = (isMarkdown ? parseMarkdown : parsePlain)(this.said);
    const keys = blocks.map((block) => JSON.stringify(block));
    let same = 0;
    while (same < keys.length && same < this.shown.length && keys[same] === this.shown[same].key) same++;
    for (const old of this.shown.splice(same)) old.element.remove();
    for (let index = same; index < blocks.length; index++) this.shown.push({ key: keys[index], ...this.showBlock(blocks[index]) });
    this.strip.hidden = !this.steps.length;
    this.slider.max = String(Math.max(0, this.steps.length - 1));
    this.showPlace();
  }

  showBlock({ kind, level, mark, runs }) {
    const isLine = kind === "line", spans = [];
    const element = add(this.text, isLine ? "span" : "div", isLine ? "" : `${kind} level${level}`);
    if (kind === "heading") {
      element.setAttribute("role", "heading");
      element.setAttribute("aria-level", String(level));
    }
    if (kind === "item") add(element, "span", "mark", mark);
    if (kind === "code" && mark) add(element, "div", "language", mark);
    const body = kind === "code" || kind === "table" ? add(element, "pre") : kind === "item" ? add(element, "span") : element;
    for (const run of runs) {
      const place = run.style ? run.style.split(" ").reduce((parent, word) => add(parent, TAGS[word]), body) : body;
      for (const { start, end, piece } of splitByPieces(run, this.pieces)) {
        const { step, accepted } = this.pieces[piece];
        const classes = `${step < 0 ? "" : "piece"}${accepted ? " accepted" : ""}${step >= 0 && step === this.chosen ? " chosen" : ""}`;
        const span = add(place, "span", classes, this.content.slice(start, end));
        span.dataset.step = String(step);
        spans.push(span);
      }
    }
    return { element, spans };
  }

  /** Mark the step that is open, -1 for none. */
  choose(number) {
    this.chosen = number;
    for (const { spans } of this.shown) {
      for (const span of spans) span.classList.toggle("chosen", number >= 0 && Number(span.dataset.step) === number);
    }
    this.showPlace();
  }

  showPlace() {
    const last = this.steps.length - 1, isOpen = this.chosen >= 0;
    this.slider.value = String(Math.max(0, this.chosen));
    this.before.disabled = !isOpen || this.chosen === 0;
    this.next.disabled = this.chosen >= last;
    this.place.textContent = isOpen ? `step ${this.chosen} of ${last}` : `${last} steps`;
  }

  /** Show tau, speed and how it compares. The seconds are those of the steps after the pass over the prompt. */
  showFigures(seconds) {
    const { tokens, steps, tau, later, speedup } = figuresOf(this.steps, this.passes);
    const speed = seconds > 0 && later ? `${(later / seconds).toFixed(1)} tok/s` : "– tok/s";
    const words = [`tau ${tau.toFixed(2)}`, speed, compared(speedup), `${tokens} tokens`, `${steps} steps`];
    this.line.textContent = words.filter(Boolean).join(" · ");
    this.line.title = speedup === null ? "" : "Compared: the time of as many steps without drafts, by the server's measured costs, over the time of these steps.";
  }

  /** Say how the answer ended; null for nothing. `goOn` is called by a button, if it can go on. */
  showEnd(end, goOn) {
    this.end.replaceChildren();
    this.end.hidden = !end;
    if (!end) return;
    add(this.end, "span", end.isError ? "error" : "", end.text);
    if (!end.goesOn || !goOn) return;
    const button = add(this.end, "button", "go-on", "Go on");
    button.type = "button";
    button.addEventListener("click", goOn);
  }
}
