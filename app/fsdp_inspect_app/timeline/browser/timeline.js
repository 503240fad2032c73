// How is a drawing explored? Pointer, keyboard and buttons move a window over it; what the window
// needs is asked of the server. Names from runs are only ever drawn as text (fillText,
// textContent), never as HTML.

const MIN_VIEW_NS = 50;
const REQUEST_DELAY_MS = 120;
const TYPING_DELAY_MS = 250;
const PAN_STEP = 0.15;
const ZOOM_STEP = 1.35;
const SCROLL_STEP = 0.8;
const MOST_SUGGESTED = 2000;
const PNG_RATIO = 2; // as sharp as a good screen
const CAPTION_HEIGHT = 20;
const SHARE_OF_HEIGHT = 0.72; // of the browser's window, at most
const LEAST_WIDTH = 240;
const DETAILS_HEIGHT = 300; // around the canvas in fullscreen

const instances = new WeakMap();

export default function renderTimeline(component) {
  const root = component.parentElement.querySelector(".timeline");
  let timeline = instances.get(root);
  if (!timeline) {
    timeline = new Timeline(root);
    instances.set(root, timeline);
  }
  timeline.sendState = component.setStateValue;
  timeline.show(new Drawing(component.data));
  return () => {
    timeline.stop();
    instances.delete(root);
  };
}

// A drawing in a saved page: it shows what it holds, and asks no server.
function showSaved(parent, bytes) {
  const root = parent.querySelector(".timeline");
  root.classList.add("saved"); // hides what needs a server
  const timeline = new Timeline(root);
  const drawing = new Drawing(bytes);
  drawing.header.is_saved = true;
  timeline.sendState = () => {};
  timeline.show(drawing);
}

class Timeline {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.pen = this.canvas.getContext("2d");
    this.tip = root.querySelector(".tip");
    this.live = root.querySelector(".live");
    this.legend = root.querySelector(".legend");
    this.input = root.querySelector("input");
    this.drawing = null;
    this.draws = 0;
    this.drag = null;
    this.reset();
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(root);
    this.listen();
  }

  // What is forgotten when another step is shown.
  reset() {
    this.hovered = NONE;
    this.hoveredBlock = NONE;
    this.selected = NONE;
    this.cursor = NONE;
    this.isSought = false;
    this.ruler = null;
    this.isPanning = false;
    this.isGoing = false; // whether the answer to the search is shown, not only counted
    this.query = "";
    this.direction = 0;
    this.serial = 0;
    this.answered = 0;
    this.pinned = [];
    this.scroll = 0;
  }

  stop() {
    this.resizing.disconnect();
    clearTimeout(this.request);
    clearTimeout(this.typing);
    cancelAnimationFrame(this.frame);
    this.pageEvents.abort();
  }

  // ---- data ----

  show(drawing) {
    const before = this.drawing && this.drawing.header;
    this.drawing = drawing;
    this.hovered = NONE;
    this.tip.hidden = true;
    if (!before || before.key !== drawing.header.key) this.open(drawing.header);
    else if (before.axis_end_ns !== drawing.header.axis_end_ns) this.adjust(before.axis_end_ns);
    this.canvas.setAttribute("aria-label", drawing.header.aria_label);
    this.fillLegend();
    this.resize();
    this.findSelected();
    this.takeAnswer(drawing.header.found);
    this.jump(drawing.header.jump);
  }

  open(header) {
    this.reset();
    const { opening } = header;
    const [start, end] = opening.view || [0, header.axis_end_ns];
    this.view = { start, end };
    this.selected = opening.selected;
    this.pinned = opening.pinned;
    this.ruler = opening.range;
    this.query = opening.query;
    this.input.value = opening.query;
    this.serial = header.found ? header.found.serial : 0;
    this.answered = this.serial;
    this.jumped = header.jump ? header.jump.serial : 0;
    this.say(".matches", "");
    const options = [...new Set(header.names)].slice(0, MOST_SUGGESTED).map((name) => {
      const option = document.createElement("option");
      option.value = name;
      return option;
    });
    this.root.querySelector("datalist").replaceChildren(...options);
  }

  // The same step with other contents, such as another prediction of it: the zoom stays.
  adjust(formerEnd) {
    const end = this.drawing.header.axis_end_ns;
    const isWhole = this.length >= formerEnd;
    const isOutside = this.view.start >= end;
    const { start, end: last } = isWhole || isOutside ? { start: 0, end } : this.view;
    this.view = { start, end: Math.min(last, end) };
    this.selected = NONE;
  }

  resize() {
    if (!this.drawing) return;
    this.width = Math.max(this.root.clientWidth, LEAST_WIDTH);
    const room = this.isFullscreen ? window.innerHeight - DETAILS_HEIGHT
      : SHARE_OF_HEIGHT * window.innerHeight;
    const most = Math.max(room, 420);
    this.layout = new Layout(this.drawing.header, this.pinned, most);
    this.height = this.layout.canvasHeight;
    this.scrollTo(this.scroll);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.requestDetail();
    this.draw();
  }

  // ---- what the server is asked ----

  // The window, unless what it needs is here already.
  requestDetail() {
    const { header } = this.drawing;
    const { start, end } = this.view;
    const isCovered = header.data_start_ns <= start && header.data_end_ns >= end;
    const isSharp = header.is_exact || header.ns_per_px <= (this.length / this.plotWidth) * 1.05;
    this.isComplete = isCovered && isSharp;
    clearTimeout(this.request);
    if (!this.isComplete) this.request = setTimeout(() => this.send(), REQUEST_DELAY_MS);
  }

  send() {
    clearTimeout(this.request);
    this.sendState("asked", {
      key: this.drawing.header.key,
      view: {
        start_ns: Math.floor(this.view.start),
        end_ns: Math.ceil(this.view.end),
        width_px: Math.round(this.plotWidth),
      },
      selected: this.selected,
      find: { query: this.query, direction: this.direction, serial: this.serial },
      pinned: this.pinned,
      range: this.rangeToSum(),
    });
  }

  // ---- geometry ----

  get gutter() {
    return gutterOf(this.width);
  }

  get plotWidth() {
    return this.width - this.gutter;
  }

  get length() {
    return this.view.end - this.view.start;
  }

  timeAt(x) {
    return this.view.start + ((x - this.gutter) / this.plotWidth) * this.length;
  }

  // The time at a position, inside the axis.
  timeWithin(x) {
    return Math.min(Math.max(this.timeAt(x), 0), this.drawing.header.axis_end_ns);
  }

  spanAt(x, y) {
    const lane = this.layout.laneAt(y, this.scroll);
    if (lane === NONE || x < this.gutter) return NONE;
    const tolerance = ["marks", "stops"].includes(this.drawing.header.lanes[lane].kind) ? 4 : 1.5;
    const slack = (tolerance * this.length) / this.plotWidth;
    return this.drawing.spanAt(lane, this.timeAt(x), slack);
  }

  // ---- moving ----

  // What can be shown, and how closely: a saved page has nothing else than it holds.
  get limits() {
    const { header } = this.drawing;
    if (!header.is_saved) return { low: 0, high: header.axis_end_ns, least: MIN_VIEW_NS };
    const least = header.is_exact ? MIN_VIEW_NS : header.ns_per_px * this.plotWidth;
    return { low: Math.max(header.data_start_ns, 0), high: header.data_end_ns, least };
  }

  setView(start, end) {
    const { low, high, least } = this.limits;
    const length = Math.min(Math.max(end - start, least), high - low);
    const first = Math.min(Math.max(start, low), high - length);
    this.view = { start: first, end: first + length };
    this.scheduleDraw();
    this.requestDetail();
  }

  zoom(factor, centre = (this.view.start + this.view.end) / 2) {
    const before = (centre - this.view.start) / this.length;
    const length = Math.max(this.length * factor, MIN_VIEW_NS);
    this.setView(centre - before * length, centre + (1 - before) * length);
  }

  moveTo(start) {
    const { low, high } = this.limits;
    const first = Math.min(Math.max(start, low), high - this.length);
    this.setView(first, first + this.length);
  }

  pan(share) {
    this.moveTo(this.view.start + this.length * share);
  }

  fit() {
    this.setView(0, this.drawing.header.axis_end_ns);
  }

  fitSelection() {
    if (this.cursor === NONE) {
      this.fit();
      return;
    }
    const start = this.drawing.columns.start[this.cursor];
    const duration = this.drawing.columns.duration[this.cursor];
    const margin = Math.max(duration, MIN_VIEW_NS);
    this.setView(start - margin, start + duration + margin);
  }

  scrollTo(scroll) {
    this.scroll = Math.min(Math.max(scroll, 0), this.layout.maxScroll);
  }

  scrollBy(pixels) {
    this.scrollTo(this.scroll + pixels);
    this.scheduleDraw();
  }

  // ---- selecting a range ----

  rangeToSum() {
    if (!this.ruler) return null;
    const [start, end] = [this.ruler.start, this.ruler.end].sort((a, b) => a - b);
    return { start_ns: Math.round(start), end_ns: Math.round(end), block: this.ruler.block };
  }

  // The selected span, or else what is shown.
  sumSelection() {
    if (this.cursor === NONE) {
      this.ruler = { ...this.view, block: this.pinned[0] ?? 0 };
    } else {
      const { start, lane } = this.drawing.columns;
      const end = this.drawing.end(this.cursor);
      this.ruler = { start: start[this.cursor], end, block: this.drawing.blockOf(lane[this.cursor]) };
    }
    this.scheduleDraw();
    this.send();
  }

  // ---- selecting ----

  select(position) {
    this.cursor = position;
    const { event } = this.drawing.columns;
    this.selected = position === NONE || !event ? NONE : event[position];
    const rows = position === NONE ? [] : this.drawing.describe(position);
    this.live.textContent = rows.map((row) => row.filter(Boolean).join(" ")).join(", ");
    this.scheduleDraw();
  }

  // Select, and tell the page, which shows the details.
  choose(position) {
    this.select(position);
    if (position === NONE) this.ruler = null;
    this.send();
  }

  // The neighbour of the selected span in its lane.
  step(direction) {
    if (!this.drawing.length) return;
    if (this.cursor === NONE) {
      this.select(this.firstOnClock());
    } else {
      const [low, high] = this.drawing.ranges[this.drawing.columns.lane[this.cursor]];
      this.select(Math.min(Math.max(this.cursor + direction, low), high - 1));
    }
    this.keepSelectedInView();
  }

  firstOnClock() {
    const { lanes } = this.drawing.header;
    const clock = lanes.findIndex((lane, position) => (
      lane.kind === "clock" && this.drawing.ranges[position][0] < this.drawing.ranges[position][1]));
    if (clock === NONE) return 0;
    const [low, high] = this.drawing.ranges[clock];
    const first = lastStartingBefore(this.drawing.columns.start, low, high, this.view.start);
    return Math.max(first, low);
  }

  // The span of the next lane that is nearest in time.
  changeLane(direction) {
    const { lane, start } = this.drawing.columns;
    const { ranges } = this.drawing;
    if (this.cursor === NONE) {
      this.step(0);
      return;
    }
    let next = lane[this.cursor] + direction;
    while (ranges[next] && ranges[next][0] === ranges[next][1]) next += direction;
    if (!ranges[next]) return;
    const [low, high] = ranges[next];
    this.select(Math.max(lastStartingBefore(start, low, high, start[this.cursor]), low));
    this.keepSelectedInView();
  }

  keepSelectedInView() {
    const { start, lane } = this.drawing.columns;
    this.keepLaneInView(lane[this.cursor]);
    const middle = (start[this.cursor] + this.drawing.end(this.cursor)) / 2;
    if (middle < this.view.start || middle > this.view.end) this.moveTo(middle - this.length / 2);
  }

  keepLaneInView(lane) {
    const top = this.layout.top[lane];
    if (this.layout.isFixed(top)) return;
    const room = this.height - this.layout.fixedBottom - FOOT_HEIGHT;
    const from = top - this.layout.fixedBottom;
    const least = from + this.layout.height[lane] - room;
    this.scrollTo(Math.max(Math.min(this.scroll, from), least));
  }

  pin(block) {
    if (block === NONE) return;
    this.pinned = this.pinned.includes(block)
      ? this.pinned.filter((one) => one !== block) : [...this.pinned, block];
    this.resize();
    this.send();
  }

  // Where the selected event is drawn; one that was sought is scrolled to as soon as it is here.
  findSelected() {
    this.cursor = this.drawing.bodyOf(this.selected);
    if (!this.isSought || this.cursor === NONE) return;
    this.isSought = false;
    this.keepLaneInView(this.drawing.columns.lane[this.cursor]);
    this.scheduleDraw();
  }

  // ---- searching ----

  // A complete name goes to its first event; else the matches are only highlighted and counted.
  onInput() {
    this.query = this.input.value;
    this.say(".matches", "");
    clearTimeout(this.typing);
    const isName = !this.query || this.drawing.header.names.includes(this.query);
    this.typing = setTimeout(() => this.find(0, isName), isName ? 0 : TYPING_DELAY_MS);
  }

  // The next match after the selection; 0: the first one from it on.
  find(direction, isGoing = true) {
    clearTimeout(this.typing);
    this.isGoing = isGoing;
    this.direction = direction;
    if (this.query) this.serial += 1;
    this.send();
  }

  takeAnswer(found) {
    if (!found || found.serial <= this.answered) return;
    this.answered = found.serial;
    if (found.event === NONE) {
      this.say(".matches", found.reason);
    } else if (this.isGoing) {
      this.say(".matches", `${found.number} of ${found.total}`);
      this.goTo(found);
    } else {
      this.say(".matches", `${found.total} found`);
    }
  }

  // Where a button of the page leads.
  jump(place) {
    if (!place || place.serial <= this.jumped) return;
    this.jumped = place.serial;
    this.goTo(place);
    this.canvas.focus({ preventScroll: true });
  }

  // Select an event and bring it into view, wide enough to be seen.
  goTo({ event, start_ns: start, end_ns: end }) {
    this.selected = event;
    this.isSought = true;
    this.findSelected();
    const length = end - start;
    const isTiny = (length / this.length) * this.plotWidth < 16;
    const shown = isTiny ? Math.max(12 * length, MIN_VIEW_NS) : this.length;
    const middle = (start + end) / 2;
    if (isTiny || start < this.view.start || end > this.view.end) {
      this.setView(middle - shown / 2, middle + shown / 2);
    }
    this.scheduleDraw();
    this.send(); // the page shows its details
  }

  say(selector, text) {
    this.root.querySelector(selector).textContent = text;
  }

  // ---- pointer and keyboard ----

  listen() {
    const { canvas, input } = this;
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("pointerleave", () => this.hover(NONE, NONE));
    canvas.addEventListener("dblclick", (event) => { if (event.offsetX > this.gutter) this.fit(); });
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    this.pageEvents = new AbortController();
    document.addEventListener("fullscreenchange", () => this.onFullscreen(),
      { signal: this.pageEvents.signal });
    input.addEventListener("input", () => this.onInput());
    input.addEventListener("keydown", (event) => this.onSearchKey(event));
    const commands = {
      next: () => this.find(1),
      previous: () => this.find(-1),
      "zoom-in": () => this.zoom(1 / ZOOM_STEP),
      "zoom-out": () => this.zoom(ZOOM_STEP),
      fit: () => this.fit(),
      range: () => this.sumSelection(),
      pan: () => this.togglePan(),
      fullscreen: () => this.toggleFullscreen(),
      png: () => this.savePng(),
      link: () => this.copyLink(),
      help: () => this.toggleHelp(),
    };
    for (const button of this.root.querySelectorAll("button")) {
      button.addEventListener("click", commands[button.dataset.command]);
    }
  }

  onWheel(event) {
    if (event.offsetX < this.gutter) {
      if (!this.layout.maxScroll) return;
      event.preventDefault();
      this.scrollBy(event.deltaY);
      return;
    }
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / this.plotWidth);
      return;
    }
    const isWhole = this.length >= this.drawing.header.axis_end_ns;
    if (event.deltaY > 0 && isWhole) return; // nothing left to zoom out: let the page scroll
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY * 0.002), this.timeAt(event.offsetX));
  }

  onDown(event) {
    this.canvas.setPointerCapture(event.pointerId);
    const block = this.blockAt(event.offsetY);
    const isRuler = !(event.shiftKey || this.isPanning) && event.offsetX > this.gutter;
    this.drag = {
      x: event.offsetX,
      y: event.offsetY,
      start: this.view.start,
      scroll: this.scroll,
      isRuler,
      block: block === NONE ? this.pinned[0] ?? 0 : block,
      moved: false,
    };
  }

  onMove(event) {
    if (!this.drag) {
      this.point(event.offsetX, event.offsetY);
      return;
    }
    const distance = event.offsetX - this.drag.x;
    const fall = event.offsetY - this.drag.y;
    if (Math.max(Math.abs(distance), Math.abs(fall)) > 3) this.drag.moved = true;
    if (!this.drag.moved) return;
    this.hover(NONE, NONE);
    if (this.drag.isRuler) {
      const { x, block } = this.drag;
      this.ruler = { start: this.timeWithin(x), end: this.timeWithin(event.offsetX), block };
      this.scheduleDraw();
      return;
    }
    this.scrollTo(this.drag.scroll - fall);
    this.moveTo(this.drag.start - (distance / this.plotWidth) * this.length);
  }

  onUp(event) {
    const { drag } = this;
    this.drag = null;
    if (!drag) return;
    if (drag.moved) {
      if (drag.isRuler) this.send(); // the page sums the range
    } else if (event.offsetX < this.gutter) {
      this.pin(this.blockAt(event.offsetY));
    } else if (!this.drawing.header.is_exact) {
      this.zoom(1 / 8, this.timeAt(event.offsetX));
    } else {
      this.choose(this.spanAt(event.offsetX, event.offsetY));
    }
  }

  blockAt(y) {
    const lane = this.layout.laneAt(y, this.scroll);
    return lane === NONE ? NONE : this.layout.blockOf[lane];
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const page = SCROLL_STEP * (this.height - this.layout.fixedBottom);
    const commands = {
      a: () => this.pan(-PAN_STEP),
      d: () => this.pan(PAN_STEP),
      w: () => this.zoom(1 / ZOOM_STEP),
      s: () => this.zoom(ZOOM_STEP),
      f: () => (event.shiftKey ? this.toggleFullscreen() : this.fitSelection()),
      r: () => this.sumSelection(),
      0: () => this.fit(),
      n: () => this.find(event.shiftKey ? -1 : 1),
      p: () => this.pin(this.cursor === NONE ? this.pinned[0] ?? 0
        : this.drawing.blockOf(this.drawing.columns.lane[this.cursor])),
      "/": () => this.input.focus(),
      "?": () => this.toggleHelp(),
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      ArrowUp: () => this.changeLane(-1),
      ArrowDown: () => this.changeLane(1),
      PageUp: () => this.scrollBy(-page),
      PageDown: () => this.scrollBy(page),
      Enter: () => this.choose(this.cursor),
      Escape: () => this.choose(NONE),
    };
    const command = commands[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!command) return;
    event.preventDefault();
    event.stopPropagation();
    command();
  }

  onSearchKey(event) {
    event.stopPropagation();
    if (event.key === "Enter") {
      event.preventDefault();
      this.find(event.shiftKey ? -1 : Number(this.isGoing && this.answered > 0));
    } else if (event.key === "Escape") {
      event.preventDefault();
      this.canvas.focus();
    }
  }

  // ---- what is pointed at ----

  point(x, y) {
    const lane = this.layout.laneAt(y, this.scroll);
    const isOnName = x < this.gutter && lane !== NONE;
    this.hover(this.spanAt(x, y), isOnName ? this.layout.blockOf[lane] : NONE, x, y);
    if (this.hovered !== NONE || x < this.gutter) return;
    if (lane !== NONE) this.pointAtMemory(lane, x, y);
    if (this.layout.isDifferenceAt(y, this.scroll)) this.pointAtChange(x, y);
  }

  hover(position, block, x, y) {
    const hasMoved = position !== this.hovered || block !== this.hoveredBlock;
    this.hovered = position;
    this.hoveredBlock = block;
    this.canvas.style.cursor = position === NONE && block === NONE ? "grab" : "pointer";
    this.canvas.title = block === NONE ? "" : "Click to pin this rank at the top";
    this.tip.hidden = position === NONE;
    if (position !== NONE) {
      if (hasMoved) this.fillTip(this.drawing.describe(position));
      this.placeTip(x, y);
    }
    if (hasMoved) this.scheduleDraw();
  }

  pointAtMemory(lane, x, y) {
    const reading = this.drawing.readingAt(lane, this.timeAt(x));
    if (reading === NONE) return;
    this.fillTip(this.drawing.describeReading(lane, reading));
    this.tip.hidden = false;
    this.placeTip(x, y);
  }

  pointAtChange(x, y) {
    const time = this.timeAt(x);
    const found = this.drawing.header.difference.spans
      .find(({ start_ns: start, end_ns: end }) => start <= time && time <= end);
    if (!found) return;
    this.fillTip(this.drawing.describeChange(found));
    this.tip.hidden = false;
    this.placeTip(x, y);
  }

  fillTip(rows) {
    this.tip.replaceChildren(...rows.map(([label, value], line) => {
      const row = document.createElement("div");
      row.className = line === 0 ? "title" : "row";
      for (const text of line === 0 ? [label] : [label, value]) {
        const cell = document.createElement("span");
        cell.textContent = text;
        row.append(cell);
      }
      return row;
    }));
  }

  placeTip(x, y) {
    const box = this.tip.getBoundingClientRect();
    const left = x + 14 + box.width > this.width ? x - box.width - 14 : x + 14;
    this.tip.style.left = `${Math.max(left, 0)}px`;
    this.tip.style.top = `${y + 16}px`;
  }

  fillLegend() {
    this.legend.replaceChildren(...this.drawing.legend().map(({ label, colour, kind }) => {
      const entry = document.createElement("span");
      const swatch = document.createElement("i");
      if (colour) swatch.style.backgroundColor = colour;
      swatch.className = kind;
      entry.append(swatch, document.createTextNode(label));
      return entry;
    }));
  }

  // ---- buttons ----

  togglePan() {
    this.isPanning = !this.isPanning;
    this.root.querySelector('[data-command="pan"]').setAttribute("aria-pressed", this.isPanning);
  }

  // The part of the page with the canvas and its details.
  get surroundings() {
    const { host } = this.root.getRootNode();
    return (host || this.root).closest("[class*=st-key-frame-]") || this.root;
  }

  get isFullscreen() {
    return document.fullscreenElement === this.surroundings;
  }

  async toggleFullscreen() {
    try {
      await (this.isFullscreen ? document.exitFullscreen() : this.surroundings.requestFullscreen());
      this.canvas.focus({ preventScroll: true });
    } catch {
      this.say(".said", "this browser has no fullscreen mode");
    }
  }

  onFullscreen() {
    const button = this.root.querySelector('[data-command="fullscreen"]');
    button.setAttribute("aria-pressed", this.isFullscreen);
    this.resize();
  }

  toggleHelp() {
    const help = this.root.querySelector(".help");
    help.hidden = !help.hidden;
    this.root.querySelector('[data-command="help"]').setAttribute("aria-expanded", !help.hidden);
  }

  // The address of the page; where it understands them, with window, selection, pins and unit.
  linkToThis() {
    const address = new URL(window.location.href);
    const { header } = this.drawing;
    if (!header.is_linked) return address.href;
    const put = (name, values) => {
      address.searchParams.delete(name);
      for (const value of values) address.searchParams.append(name, value);
    };
    const isWhole = this.length >= header.axis_end_ns;
    const window_ = `${Math.floor(this.view.start)}-${Math.ceil(this.view.end)}`;
    put("window", isWhole ? [] : [window_]);
    put("span", this.selected === NONE ? [] : [this.nameOfEvent(this.selected)]);
    const range = this.rangeToSum();
    put("range", range ? [`${header.blocks[range.block].rank}-${range.start_ns}-${range.end_ns}`] : []);
    put("top", this.pinned.map((block) => String(header.blocks[block].rank)));
    put("unit", header.units.includes(this.query) ? [this.query] : []);
    return address.href;
  }

  // As the page's address names an event: its rank, and its number on that rank.
  nameOfEvent(event) {
    const owner = this.drawing.header.blocks.filter((block) => block.first_event <= event).pop();
    return `${owner.rank}-${event - owner.first_event}`;
  }

  async copyLink() {
    const link = this.linkToThis();
    try {
      await navigator.clipboard.writeText(link);
      this.say(".said", "link copied");
    } catch {
      window.prompt("Copy this link:", link); // no clipboard without https or localhost
    }
    setTimeout(() => this.say(".said", ""), 4000);
  }

  // All ranks, not only those that are scrolled to, with the legend and the words below.
  savePng() {
    const layout = new Layout(this.drawing.header, this.pinned, Infinity);
    const height = layout.canvasHeight;
    const rows = this.legendRows();
    const picture = document.createElement("canvas");
    picture.width = this.width * PNG_RATIO;
    picture.height = (height + rows.length * CAPTION_HEIGHT + CAPTION_HEIGHT) * PNG_RATIO;
    const pen = picture.getContext("2d");
    pen.scale(PNG_RATIO, PNG_RATIO);
    new Painter(pen, { ...this.scene(), layout, height, scroll: 0 }).paint();
    this.paintCaption(pen, rows, height);
    picture.toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = this.drawing.header.file_name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }

  // The legend's entries and where each begins, row by row as they fit.
  legendRows() {
    this.pen.font = `11px ${this.scene().font}`;
    const rows = [[]];
    let x = 2;
    for (const entry of this.drawing.legend()) {
      const width = this.pen.measureText(entry.label).width + 30;
      if (x + width > this.width && rows.at(-1).length) {
        rows.push([]);
        x = 2;
      }
      rows.at(-1).push({ ...entry, x });
      x += width;
    }
    return rows;
  }

  paintCaption(pen, rows, top) {
    const { colours, font } = this.scene();
    pen.fillStyle = colours.background;
    pen.fillRect(0, top, this.width, (rows.length + 1) * CAPTION_HEIGHT);
    pen.font = `11px ${font}`;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    rows.forEach((entries, row) => {
      const y = top + row * CAPTION_HEIGHT;
      for (const { label, colour, kind, x } of entries) {
        const isLine = kind === "line";
        pen.fillStyle = colour || (isLine ? colours.text : colours.memory);
        pen.globalAlpha = kind === "area" ? AREA_ALPHA : 1;
        pen.fillRect(x, y + (isLine ? 8 : 4), 12, isLine ? 2 : 10);
        pen.globalAlpha = 1;
        if (kind === "hatched") {
          pen.fillStyle = hatch();
          pen.fillRect(x, y + 4, 12, 10);
        }
        pen.fillStyle = colours.text;
        pen.fillText(label, x + 16, y + 9.5);
      }
    });
    const words = this.drawing.header.aria_label.split(" Hatched")[0];
    pen.fillStyle = colours.text;
    pen.fillText(words, 2, top + rows.length * CAPTION_HEIGHT + 9.5);
  }

  // ---- drawing ----

  scheduleDraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  scene() {
    const style = getComputedStyle(this.root);
    const colours = Object.fromEntries(
      ["text", "faint", "line", "band", "background", "memory"].map(
        (name) => [name, style.getPropertyValue(`--timeline-${name}`).trim()],
      ),
    );
    const { drawing, layout, view, width, height, scroll, hovered, hoveredBlock, selected, ruler,
      pinned } = this;
    return { drawing, layout, view, width, height, scroll, hovered, hoveredBlock, selected, ruler,
      pinned, colours, font: style.fontFamily };
  }

  draw() {
    new Painter(this.pen, this.scene()).paint();
    this.draws += 1;
    Object.assign(this.canvas.dataset, { // what tests can read of the picture
      startNs: Math.round(this.view.start),
      endNs: Math.round(this.view.end),
      rectangles: this.drawing.length,
      exact: this.drawing.header.is_exact,
      complete: this.isComplete,
      selected: this.selected,
      arrows: this.selected === NONE ? 0 : this.drawing.arrowsOf(this.selected).length,
      pinned: this.pinned.join(","),
      scroll: Math.round(this.scroll),
      ruler: this.ruler ? Math.round(Math.abs(this.ruler.end - this.ruler.start)) : "",
      ruledBlock: this.ruler ? this.ruler.block : "",
      fullscreen: this.isFullscreen,
      draws: this.draws,
    });
  }
}
