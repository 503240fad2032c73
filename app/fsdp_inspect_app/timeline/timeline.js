// How is one step drawn and explored? A canvas with lanes, fed by packing.py, driven by pointer
// and keyboard. Names of units are only ever drawn as text (fillText, textContent), never as HTML.

const GUTTER = 172;
const AXIS_HEIGHT = 26;
const FOOT_HEIGHT = 14;
const CLOCK_HEIGHT = 28;
const LANE_HEIGHT = 20;
const RANK_GAP = 12;
const LANE_GAP = 3;
const MIN_LABEL_WIDTH = 16;
const MIN_VIEW_NS = 50;
const REQUEST_DELAY_MS = 150;
const PAN_STEP = 0.15;
const ZOOM_STEP = 1.35;
const NONE = -1;

const ARRAYS = {
  f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, u2: Uint16Array,
  u1: Uint8Array,
};

const instances = new WeakMap();

export default function renderTimeline(component) {
  const root = component.parentElement.querySelector(".timeline");
  let timeline = instances.get(root);
  if (!timeline) {
    timeline = new Timeline(root);
    instances.set(root, timeline);
  }
  timeline.sendState = component.setStateValue;
  timeline.show(unpack(component.data));
  return () => {
    timeline.stop();
    instances.delete(root);
  };
}

export function unpack(bytes) {
  const buffer = bytes.buffer.slice(bytes.byteOffset, bytes.byteOffset + bytes.byteLength);
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const columns = {};
  let offset = padded(8 + length);
  for (const { name, dtype, length: count } of header.columns) {
    columns[name] = new ARRAYS[dtype](buffer, offset, count);
    offset += padded(columns[name].byteLength);
  }
  return { header, columns };
}

function padded(size) {
  return Math.ceil(size / 8) * 8;
}

// ---- numbers to text, as fsdp_inspect.formatting does ----

function threeDigits(value) {
  const magnitude = Math.abs(value);
  if (magnitude >= 1000) return value.toFixed(0);
  return magnitude >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function scaled(value, steps, fallback) {
  for (const [size, suffix] of steps) {
    if (Math.abs(value) >= size) return `${threeDigits(value / size)} ${suffix}`;
  }
  return fallback;
}

function formatNs(value) {
  const steps = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"]];
  return scaled(value, steps, `${value.toFixed(0)} ns`);
}

function formatBytes(value) {
  const steps = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
  return scaled(value, steps, `${value.toFixed(0)} B`);
}

function formatRate(value) {
  const steps = [[1e12, "TB/s"], [1e9, "GB/s"], [1e6, "MB/s"], [1e3, "kB/s"]];
  return scaled(value, steps, `${value.toFixed(0)} B/s`);
}

function tickLength(viewLength, pixels) {
  const wanted = (viewLength * 110) / pixels;
  const power = 10 ** Math.floor(Math.log10(wanted));
  const factor = [1, 2, 5, 10].find((candidate) => candidate * power >= wanted);
  return factor * power;
}

// All ticks of a step have one unit, whatever the zoom, so that they compare.
function formatTick(time, step, axisEnd) {
  const units = [[1e9, "s"], [1e6, "ms"], [1e3, "µs"], [1, "ns"]];
  const [size, suffix] = units.find(([candidate]) => axisEnd >= 10 * candidate) || units[3];
  const digits = Math.max(0, Math.ceil(-Math.log10(step / size) - 1e-9));
  return `${(time / size).toFixed(digits)} ${suffix}`;
}

class Timeline {
  constructor(root) {
    this.root = root;
    this.canvas = root.querySelector("canvas");
    this.tip = root.querySelector(".tip");
    this.live = root.querySelector(".live");
    this.legend = root.querySelector(".legend");
    this.pen = this.canvas.getContext("2d");
    this.shown = null;
    this.hovered = NONE;
    this.selected = NONE;
    this.drag = null;
    this.ruler = null;
    this.draws = 0;
    this.resizing = new ResizeObserver(() => this.resize());
    this.resizing.observe(root);
    this.listen();
  }

  stop() {
    this.resizing.disconnect();
    clearTimeout(this.request);
    cancelAnimationFrame(this.frame);
  }

  // ---- data ----

  show(data) {
    const isOther = !this.shown || this.shown.header.view_key !== data.header.view_key;
    this.shown = data;
    this.hovered = NONE;
    this.index = indexLanes(data.columns, data.header.lanes.length);
    this.tops = laneTops(data.header.lanes);
    this.hatches = data.header.looks.map((look) => (look.hatched ? hatchOf(look) : null));
    if (isOther) {
      this.view = { start: 0, end: data.header.axis_end_ns };
      this.selected = NONE;
      this.ruler = null;
    }
    this.canvas.setAttribute("aria-label", data.header.aria_label);
    this.fillLegend();
    this.resize();
  }

  resize() {
    if (!this.shown) return;
    const ratio = window.devicePixelRatio || 1;
    this.width = Math.max(this.root.clientWidth, GUTTER + 100);
    this.height = this.tops.bottom + FOOT_HEIGHT;
    this.canvas.width = Math.round(this.width * ratio);
    this.canvas.height = Math.round(this.height * ratio);
    this.canvas.style.width = `${this.width}px`;
    this.canvas.style.height = `${this.height}px`;
    this.pen.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.draw();
    this.requestDetail();
  }

  // ---- geometry ----

  get plotWidth() {
    return this.width - GUTTER;
  }

  get viewLength() {
    return this.view.end - this.view.start;
  }

  xOf(time) {
    return GUTTER + ((time - this.view.start) / this.viewLength) * this.plotWidth;
  }

  timeAt(x) {
    return this.view.start + ((x - GUTTER) / this.plotWidth) * this.viewLength;
  }

  laneAt(y) {
    const { top, height } = this.tops;
    for (let lane = 0; lane < top.length; lane += 1) {
      if (y >= top[lane] && y < top[lane] + height[lane]) return lane;
    }
    return NONE;
  }

  // The span under a point; a pixel of tolerance lets very short ones be hit.
  spanAt(x, y) {
    const lane = this.laneAt(y);
    if (lane === NONE || x < GUTTER) return NONE;
    const { start, duration } = this.shown.columns;
    const [low, high] = this.index[lane];
    const slack = (1.5 * this.viewLength) / this.plotWidth;
    const time = this.timeAt(x);
    let best = NONE;
    let bestGap = slack;
    let position = Math.max(lastStartingBefore(start, low, high, time + slack), low);
    for (; position >= low && position < high; position -= 1) {
      const end = start[position] + duration[position];
      const gap = Math.max(start[position] - time, time - end, 0);
      if (gap <= bestGap) {
        best = position;
        bestGap = gap;
      }
      if (end < time - slack || gap === 0) break;
    }
    return best;
  }

  // ---- moving ----

  setView(start, end) {
    const axisEnd = this.shown.header.axis_end_ns;
    const length = Math.min(Math.max(end - start, MIN_VIEW_NS), axisEnd);
    const first = Math.min(Math.max(start, 0), axisEnd - length);
    this.view = { start: first, end: first + length };
    this.scheduleDraw();
    this.requestDetail();
  }

  zoom(factor, centre = (this.view.start + this.view.end) / 2) {
    const before = (centre - this.view.start) / this.viewLength;
    const length = Math.max(this.viewLength * factor, MIN_VIEW_NS);
    this.setView(centre - before * length, centre + (1 - before) * length);
  }

  pan(share) {
    const shift = this.viewLength * share;
    const start = Math.min(
      Math.max(this.view.start + shift, 0),
      this.shown.header.axis_end_ns - this.viewLength,
    );
    this.setView(start, start + this.viewLength);
  }

  fit() {
    this.setView(0, this.shown.header.axis_end_ns);
  }

  fitSelection() {
    if (this.selected === NONE) {
      this.fit();
      return;
    }
    const { start, duration } = this.shown.columns;
    const margin = Math.max(duration[this.selected], MIN_VIEW_NS);
    this.setView(start[this.selected] - margin, start[this.selected] + duration[this.selected] + margin);
  }

  // Ask the server for what the view needs, unless it is here already.
  requestDetail() {
    const { header } = this.shown;
    const { start, end } = this.view;
    const isCovered = header.data_start_ns <= start && header.data_end_ns >= end;
    const sent = header.sent_view;
    const isSharp = header.is_exact || (sent.end_ns - sent.start_ns) / sent.width_px
      <= (this.viewLength / this.plotWidth) * 1.05;
    clearTimeout(this.request);
    if (isCovered && isSharp) return;
    this.request = setTimeout(() => {
      this.sendState("view", {
        key: header.view_key,
        start_ns: Math.floor(start),
        end_ns: Math.ceil(end),
        width_px: Math.round(this.plotWidth),
      });
    }, REQUEST_DELAY_MS);
  }

  select(position, { announce = true } = {}) {
    this.selected = position;
    if (position !== NONE && announce) {
      this.live.textContent = this.describe(position).map((row) => row.join(" ")).join(", ");
    }
    this.scheduleDraw();
  }

  // Tell the page, which shows the details of the selected event beside the chart.
  choose(position) {
    this.select(position);
    const { header, columns } = this.shown;
    if (!columns.event) return;
    const event = position === NONE ? NONE : columns.event[position];
    this.sendState("selected", { key: header.view_key, event });
  }

  // ---- pointer and keyboard ----

  listen() {
    const { canvas } = this;
    canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    canvas.addEventListener("pointerdown", (event) => this.onDown(event));
    canvas.addEventListener("pointermove", (event) => this.onMove(event));
    canvas.addEventListener("pointerup", (event) => this.onUp(event));
    canvas.addEventListener("pointerleave", () => this.hover(NONE));
    canvas.addEventListener("dblclick", () => this.fit());
    canvas.addEventListener("keydown", (event) => this.onKey(event));
    const commands = {
      "zoom-in": () => this.zoom(1 / ZOOM_STEP),
      "zoom-out": () => this.zoom(ZOOM_STEP),
      fit: () => this.fit(),
      png: () => this.savePng(),
    };
    for (const button of this.root.querySelectorAll("button")) {
      button.addEventListener("click", commands[button.dataset.command]);
    }
  }

  onWheel(event) {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY) || event.shiftKey) {
      event.preventDefault();
      this.pan((event.deltaX || event.deltaY) / this.plotWidth);
      return;
    }
    const isWhole = this.viewLength >= this.shown.header.axis_end_ns;
    if (event.deltaY > 0 && isWhole) return; // nothing left to zoom out: let the page scroll
    event.preventDefault();
    this.zoom(Math.exp(event.deltaY * 0.002), this.timeAt(event.offsetX));
  }

  onDown(event) {
    this.canvas.setPointerCapture(event.pointerId);
    this.drag = { x: event.offsetX, start: this.view.start, isRuler: event.shiftKey, moved: false };
    if (event.shiftKey) this.ruler = [this.timeAt(event.offsetX), this.timeAt(event.offsetX)];
  }

  onMove(event) {
    if (!this.drag) {
      this.hover(this.spanAt(event.offsetX, event.offsetY), event.offsetX, event.offsetY);
      return;
    }
    const distance = event.offsetX - this.drag.x;
    if (Math.abs(distance) > 2) this.drag.moved = true;
    if (!this.drag.moved) return;
    this.hover(NONE);
    if (this.drag.isRuler) {
      this.ruler[1] = this.timeAt(event.offsetX);
      this.scheduleDraw();
      return;
    }
    const start = this.drag.start - (distance / this.plotWidth) * this.viewLength;
    const last = this.shown.header.axis_end_ns - this.viewLength;
    const first = Math.min(Math.max(start, 0), last);
    this.setView(first, first + this.viewLength);
  }

  onUp(event) {
    const drag = this.drag;
    this.drag = null;
    if (!drag || drag.moved) return;
    if (drag.isRuler) this.ruler = null;
    else this.choose(this.spanAt(event.offsetX, event.offsetY));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const commands = {
      a: () => this.pan(-PAN_STEP),
      d: () => this.pan(PAN_STEP),
      w: () => this.zoom(1 / ZOOM_STEP),
      s: () => this.zoom(ZOOM_STEP),
      f: () => this.fitSelection(),
      0: () => this.fit(),
      ArrowLeft: () => this.step(-1),
      ArrowRight: () => this.step(1),
      ArrowUp: () => this.changeLane(-1),
      ArrowDown: () => this.changeLane(1),
      Enter: () => this.choose(this.selected),
      Escape: () => this.choose(NONE),
    };
    const command = commands[event.key.length === 1 ? event.key.toLowerCase() : event.key];
    if (!command) return;
    event.preventDefault();
    event.stopPropagation();
    command();
  }

  // The neighbour of the selected span in its lane.
  step(direction) {
    if (!this.shown.columns.lane.length) return;
    if (this.selected === NONE) {
      this.select(0);
    } else {
      const [low, high] = this.index[this.shown.columns.lane[this.selected]];
      this.select(Math.min(Math.max(this.selected + direction, low), high - 1));
    }
    this.keepSelectedInView();
  }

  // The span of the next lane that is nearest in time.
  changeLane(direction) {
    const { lane, start } = this.shown.columns;
    if (this.selected === NONE) {
      this.step(0);
      return;
    }
    let next = lane[this.selected] + direction;
    while (this.index[next] && this.index[next][0] === this.index[next][1]) next += direction;
    if (!this.index[next]) return;
    const [low, high] = this.index[next];
    this.select(Math.max(lastStartingBefore(start, low, high, start[this.selected]), low));
    this.keepSelectedInView();
  }

  keepSelectedInView() {
    const { start, duration } = this.shown.columns;
    const middle = start[this.selected] + duration[this.selected] / 2;
    if (middle < this.view.start || middle > this.view.end) {
      this.setView(middle - this.viewLength / 2, middle + this.viewLength / 2);
    }
  }

  hover(position, x, y) {
    const hasMoved = position !== this.hovered;
    this.hovered = position;
    this.tip.hidden = position === NONE;
    if (position !== NONE) {
      if (hasMoved) this.fillTip(position);
      const box = this.tip.getBoundingClientRect();
      const left = x + 14 + box.width > this.width ? x - box.width - 14 : x + 14;
      this.tip.style.left = `${Math.max(left, 0)}px`;
      this.tip.style.top = `${y + 16}px`;
    }
    this.canvas.style.cursor = position === NONE ? "grab" : "pointer";
    if (hasMoved) this.scheduleDraw();
  }

  // ---- words ----

  nameOf(position) {
    const { unit } = this.shown.columns;
    if (!unit) return "";
    return unit[position] === NONE ? "" : this.shown.header.units[unit[position]];
  }

  // What a tooltip says about a rectangle: pairs of label and value.
  describe(position) {
    const { header, columns } = this.shown;
    const look = header.looks[columns.look[position]];
    const lane = header.lanes[columns.lane[position]];
    const duration = columns.duration[position];
    const title = [look.label, this.nameOf(position)].filter(Boolean).join(" · ");
    const rows = [[title, ""], ["rank", String(lane.rank)]];
    if (!header.is_exact) {
      const busy = Math.round((columns.shade[position] / 255) * 100);
      rows.push(["busy", `up to ${busy} % of ${formatNs(duration)}`], ["", "zoom in for units"]);
      return rows;
    }
    rows.push(["duration", formatNs(duration)], ["start", formatNs(columns.start[position])]);
    const phase = header.phases[columns.phase[position]];
    if (phase) rows.push(["phase", phase]);
    if (columns.bytes[position] >= 0) rows.push(...this.describeTransfer(position));
    rows.push(["obtained", header.provenances[columns.provenance[position]]]);
    return rows;
  }

  describeTransfer(position) {
    const { header, columns } = this.shown;
    const rows = [["message", formatBytes(columns.bytes[position])]];
    const rate = columns.bus_bytes_per_s[position];
    rows.push(["bus bandwidth", rate < 0 ? "–" : formatRate(rate)]);
    rows.push(["exposed", formatNs(columns.exposed[position])]);
    const lead = columns.need[position] - columns.issue[position];
    rows.push(["issued", Number.isNaN(lead)
      ? "nobody waited for it"
      : `${formatNs(Math.abs(lead))} ${lead < 0 ? "after" : "before"} it was needed`]);
    const issuer = columns.issued_by[position];
    if (issuer !== NONE && issuer !== columns.unit[position]) {
      rows.push(["issued by", header.units[issuer]]);
    }
    return rows;
  }

  fillTip(position) {
    this.tip.replaceChildren(...this.describe(position).map(([label, value], line) => {
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

  fillLegend() {
    const { looks, legend } = this.shown.header;
    this.legend.replaceChildren(...legend.map((position) => {
      const look = looks[position];
      const entry = document.createElement("span");
      const swatch = document.createElement("i");
      swatch.style.backgroundColor = look.colour;
      if (look.hatched) swatch.className = "hatched";
      entry.append(swatch, document.createTextNode(look.label));
      return entry;
    }));
  }

  // ---- drawing ----

  scheduleDraw() {
    cancelAnimationFrame(this.frame);
    this.frame = requestAnimationFrame(() => this.draw());
  }

  draw() {
    const { pen } = this;
    const style = getComputedStyle(this.root);
    this.colours = {
      text: style.getPropertyValue("--timeline-text").trim(),
      faint: style.getPropertyValue("--timeline-faint").trim(),
      line: style.getPropertyValue("--timeline-line").trim(),
      band: style.getPropertyValue("--timeline-band").trim(),
      background: style.getPropertyValue("--timeline-background").trim(),
    };
    this.font = style.fontFamily;
    pen.clearRect(0, 0, this.width, this.height);
    pen.fillStyle = this.colours.background;
    pen.fillRect(0, 0, this.width, this.height);
    this.drawLanes();
    this.drawAxis();
    pen.save();
    pen.beginPath();
    pen.rect(GUTTER, AXIS_HEIGHT, this.plotWidth, this.height - AXIS_HEIGHT);
    pen.clip();
    this.drawRectangles();
    this.drawStepEnds();
    this.drawMarks();
    this.drawRuler();
    pen.restore();
    this.drawScroll();
    this.report();
  }

  // What tests and assistive tools can read of the picture.
  report() {
    this.draws += 1;
    Object.assign(this.canvas.dataset, {
      startNs: Math.round(this.view.start),
      endNs: Math.round(this.view.end),
      rectangles: this.shown.columns.lane.length,
      exact: this.shown.header.is_exact,
      draws: this.draws,
    });
  }

  drawLanes() {
    const { pen } = this;
    const { lanes } = this.shown.header;
    lanes.forEach((lane, position) => {
      const top = this.tops.top[position];
      const height = this.tops.height[position];
      pen.fillStyle = this.colours.band;
      pen.fillRect(GUTTER, top, this.plotWidth, height);
      if (lane.row > 0) return;
      pen.textBaseline = "middle";
      pen.textAlign = "right";
      pen.fillStyle = this.colours.faint;
      pen.font = `12px ${this.font}`;
      pen.fillText(lane.label, GUTTER - 10, top + height / 2 + 0.5);
      if (lane.is_first) {
        pen.textAlign = "left";
        pen.fillStyle = this.colours.text;
        pen.font = `600 13px ${this.font}`;
        pen.fillText(`rank ${lane.rank}`, 2, top + height / 2 + 0.5);
      }
    });
  }

  drawAxis() {
    const { pen } = this;
    const step = tickLength(this.viewLength, this.plotWidth);
    pen.font = `11px ${this.font}`;
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (let tick = Math.ceil(this.view.start / step) * step; tick <= this.view.end; tick += step) {
      const x = Math.round(this.xOf(tick)) + 0.5;
      pen.strokeStyle = this.colours.line;
      pen.beginPath();
      pen.moveTo(x, AXIS_HEIGHT - 10);
      pen.lineTo(x, this.tops.bottom);
      pen.stroke();
      const label = formatTick(tick, step, this.shown.header.axis_end_ns);
      if (x + 4 + pen.measureText(label).width > this.width) continue;
      pen.fillStyle = this.colours.faint;
      pen.fillText(label, x + 4, AXIS_HEIGHT - 13);
    }
  }

  drawRectangles() {
    const { columns, header } = this.shown;
    this.pen.font = `11px ${this.font}`;
    this.pen.textAlign = "left";
    this.pen.textBaseline = "middle";
    const marked = header.highlighted_unit;
    for (let lane = 0; lane < header.lanes.length; lane += 1) {
      const [low, high] = this.index[lane];
      let drawnTo = -Infinity;
      let position = Math.max(lastStartingBefore(columns.start, low, high, this.view.start), low);
      for (; position < high && columns.start[position] < this.view.end; position += 1) {
        const left = this.xOf(columns.start[position]);
        const right = this.xOf(columns.start[position] + columns.duration[position]);
        if (right < GUTTER || right < drawnTo + 0.3) continue;
        drawnTo = right;
        const isFaded = marked !== NONE && columns.unit && columns.unit[position] !== marked;
        this.drawRectangle(position, lane, left, Math.max(right - left, 0.7), isFaded);
      }
    }
    this.pen.globalAlpha = 1;
  }

  drawRectangle(position, lane, left, width, isFaded) {
    const { pen } = this;
    const { columns, header } = this.shown;
    const look = header.looks[columns.look[position]];
    const top = this.tops.top[lane];
    const height = this.tops.height[lane];
    const gap = width > 4 ? 1 : 0;
    pen.globalAlpha = (columns.shade[position] / 255) * (isFaded ? 0.22 : 1);
    pen.fillStyle = look.colour;
    pen.fillRect(left, top, width - gap, height);
    const hatch = this.hatches[columns.look[position]];
    if (hatch && width > 2) {
      pen.fillStyle = hatch;
      pen.fillRect(left, top, width - gap, height);
    }
    if (header.is_exact && width > MIN_LABEL_WIDTH) this.drawName(position, look, left, top, width, height);
  }

  drawName(position, look, left, top, width, height) {
    const { pen } = this;
    const from = Math.max(left, GUTTER) + 4;
    const room = Math.min(left + width, this.width) - from - 3;
    const isOnClock = this.shown.header.lanes[this.shown.columns.lane[position]].is_first;
    const name = this.nameOf(position) || (isOnClock ? look.label : "");
    const text = shortened(pen, name, room);
    if (!text) return;
    if (look.hatched) {
      pen.fillStyle = look.colour;
      pen.fillRect(from - 3, top + height / 2 - 7, pen.measureText(text).width + 6, 14);
    }
    pen.fillStyle = look.ink;
    pen.fillText(text, from, top + height / 2 + 0.5);
  }

  drawStepEnds() {
    const { pen } = this;
    pen.strokeStyle = this.colours.faint;
    pen.setLineDash([3, 3]);
    for (const { start_ns: start, end_ns: end, first_lane: first, last_lane: last } of
      this.shown.header.windows) {
      for (const time of [start, end]) {
        const x = Math.round(this.xOf(time)) + (time === start ? 0.5 : -0.5);
        pen.beginPath();
        pen.moveTo(x, this.tops.top[first] - 3);
        pen.lineTo(x, this.tops.top[last] + this.tops.height[last] + 3);
        pen.stroke();
      }
    }
    pen.setLineDash([]);
  }

  // Outline hovered and selected spans, all pieces of the same event, and when it was issued.
  drawMarks() {
    const { columns } = this.shown;
    if (!columns.event) return;
    for (const position of new Set([this.hovered, this.selected])) {
      if (position === NONE) continue;
      for (let other = 0; other < columns.event.length; other += 1) {
        if (columns.event[other] === columns.event[position]) {
          this.outline(other, position === this.selected);
        }
      }
      this.drawIssue(position);
    }
  }

  outline(position, isStrong) {
    const { pen } = this;
    const { columns } = this.shown;
    const lane = columns.lane[position];
    const left = this.xOf(columns.start[position]);
    const width = Math.max(this.xOf(columns.start[position] + columns.duration[position]) - left, 2);
    pen.strokeStyle = this.colours.text;
    pen.lineWidth = isStrong ? 2 : 1.2;
    pen.strokeRect(left, this.tops.top[lane], width - 1, this.tops.height[lane]);
    pen.lineWidth = 1;
  }

  drawIssue(position) {
    const { pen } = this;
    const { columns } = this.shown;
    if (!columns.issue || columns.bytes[position] < 0) return;
    const event = columns.event[position];
    for (let other = 0; other < columns.event.length; other += 1) {
      const isOnClock = this.shown.header.lanes[columns.lane[other]].is_first;
      if (columns.event[other] !== event || isOnClock) continue;
      const middle = this.tops.top[columns.lane[other]] + this.tops.height[columns.lane[other]] / 2;
      const x = this.xOf(columns.issue[other]);
      pen.strokeStyle = this.colours.text;
      pen.beginPath();
      pen.moveTo(x, middle - 6);
      pen.lineTo(x, middle + 6);
      pen.moveTo(x, middle);
      pen.lineTo(this.xOf(columns.start[other]), middle);
      pen.stroke();
    }
  }

  drawRuler() {
    if (!this.ruler) return;
    const { pen } = this;
    const [left, right] = this.ruler.map((time) => this.xOf(time)).sort((a, b) => a - b);
    pen.globalAlpha = 0.14;
    pen.fillStyle = this.colours.text;
    pen.fillRect(left, AXIS_HEIGHT, right - left, this.tops.bottom - AXIS_HEIGHT);
    pen.globalAlpha = 1;
    const label = formatNs(Math.abs(this.ruler[1] - this.ruler[0]));
    pen.font = `600 12px ${this.font}`;
    const width = pen.measureText(label).width + 10;
    const x = (left + right) / 2 - width / 2;
    pen.fillStyle = this.colours.text;
    pen.fillRect(x, AXIS_HEIGHT + 2, width, 18);
    pen.fillStyle = this.colours.background;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(label, x + 5, AXIS_HEIGHT + 11.5);
  }

  drawScroll() {
    const { pen } = this;
    const axisEnd = this.shown.header.axis_end_ns;
    if (this.viewLength >= axisEnd) return;
    const y = this.height - 6;
    pen.fillStyle = this.colours.band;
    pen.fillRect(GUTTER, y, this.plotWidth, 4);
    pen.fillStyle = this.colours.faint;
    const left = GUTTER + (this.view.start / axisEnd) * this.plotWidth;
    pen.fillRect(left, y, Math.max((this.viewLength / axisEnd) * this.plotWidth, 6), 4);
  }

  savePng() {
    this.canvas.toBlob((blob) => {
      const link = document.createElement("a");
      link.href = URL.createObjectURL(blob);
      link.download = this.shown.header.file_name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });
  }
}

// The range of rectangles of each lane; rectangles are sorted by lane.
function indexLanes(columns, numLanes) {
  const ranges = Array.from({ length: numLanes }, () => [0, 0]);
  let low = 0;
  for (let lane = 0; lane < numLanes; lane += 1) {
    let high = low;
    while (high < columns.lane.length && columns.lane[high] === lane) high += 1;
    ranges[lane] = [low, high];
    low = high;
  }
  return ranges;
}

function laneTops(lanes) {
  const top = [];
  const height = [];
  let y = AXIS_HEIGHT;
  lanes.forEach((lane, position) => {
    if (position > 0 && lane.is_first) y += RANK_GAP;
    top.push(y);
    height.push(lane.is_first ? CLOCK_HEIGHT : LANE_HEIGHT);
    y += height[position] + LANE_GAP;
  });
  return { top, height, bottom: y };
}

// The last rectangle of [low, high) that starts at or before a time; low - 1 if there is none.
function lastStartingBefore(starts, low, high, time) {
  let first = low;
  let last = high;
  while (first < last) {
    const middle = (first + last) >> 1;
    if (starts[middle] <= time) first = middle + 1;
    else last = middle;
  }
  return first - 1;
}

function hatchOf(look) {
  const tile = document.createElement("canvas");
  tile.width = 8;
  tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = "rgba(255, 255, 255, 0.62)";
  pen.lineWidth = 2;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift - 1, 9);
    pen.lineTo(shift + 9, -1);
  }
  pen.stroke();
  return pen.createPattern(tile, "repeat");
}

// A name, or what of it tells units apart: the end of `layers.7`, the beginning of `norm, lm_head`.
function shortened(pen, name, room) {
  const fits = (text) => pen.measureText(text).width <= room;
  if (!name || fits(name)) return name;
  const segments = name.split(".");
  for (let first = 1; first < segments.length; first += 1) {
    const end = segments.slice(first).join(".");
    if (fits(end)) return end;
  }
  for (let kept = name.length - 1; kept >= 4; kept -= 1) {
    if (fits(`${name.slice(0, kept)}…`)) return `${name.slice(0, kept)}…`;
  }
  return "";
}
