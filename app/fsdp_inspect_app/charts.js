// Show a chart that the server drew: values under the pointer or the keyboard, zoom, and clicks.

const DRAG_PX = 6;
const LEAST_VIEW = 0.5;
const MOST_TIPS = 12; // of a row; its table has all

export default function showChart({ data, parentElement, setTriggerValue }) {
  const chart = (parentElement.chart ??= new Chart(parentElement));
  chart.show(data, (point) => setTriggerValue("point", point));
}

class Chart {
  constructor(parent) {
    this.host = element("div", "chart-host");
    this.box = element("div", "chart");
    this.tip = element("div", "chart-tip");
    this.box.tabIndex = 0;
    this.box.setAttribute("role", "group");
    this.tip.setAttribute("role", "status");
    this.tip.hidden = true;
    this.host.append(this.box, this.tip);
    parent.replaceChildren(this.host);
    const on = (name, act) => this.box.addEventListener(name, act);
    on("pointerdown", (event) => this.grab(event));
    on("pointermove", (event) => this.hover(event));
    on("pointerup", (event) => this.release(event));
    on("pointerleave", () => this.hide());
    on("blur", () => this.hide());
    on("click", (event) => this.click(event));
    on("keydown", (event) => this.press(event));
  }

  show(data, tell) {
    this.tell = tell;
    this.opens = data.opens;
    this.box.setAttribute("aria-label", data.alt);
    const keys = `Arrow keys read the values.${data.opens ? " Enter opens." : ""}`;
    this.box.setAttribute("aria-description", keys);
    this.box.classList.toggle("chart-opens", data.opens);
    if (data.markup === this.markup) return;
    this.markup = data.markup;
    this.box.innerHTML = data.markup;
    this.hide();
    this.at = null;
    for (const marked of this.box.querySelectorAll("[title]")) {
      marked.dataset.tip = marked.title;
      marked.removeAttribute("title");
    }
    const places = this.box.querySelectorAll(".chart-plot");
    this.plots = data.plots.map((plot, at) =>
      plot.values === undefined ? new Plot(places[at], plot) : new HeatMap(places[at], plot));
  }

  // What the pointer is on: { words, point, x, y } with the place on the screen; null for nothing.
  find(event) {
    const place = event.target.closest(".chart-plot");
    const plot = this.plots.find((one) => one.place === place);
    const marked = event.target.closest("[data-tip]");
    const row = event.target.closest(".chart-row");
    const point = row ? { row: Number(row.dataset.row) } : null;
    const { clientX: x, clientY: y } = event;
    if (marked) return { words: [marked.dataset.tip], point, x, y };
    if (row) return { words: tipsOf(row), point, x, y };
    return plot ? plot.find(x, y) : null;
  }

  hover(event) {
    if (this.drag && this.drag.plot.follow(this.drag, event)) return this.hide();
    this.say(this.find(event));
  }

  say(found) {
    if (!found || !found.words.length) return this.hide();
    const lines = found.words.map((words) => {
      const line = element("div", "");
      line.textContent = words;
      return line;
    });
    this.tip.replaceChildren(...lines);
    this.tip.hidden = false;
    const host = this.host.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const right = found.x - host.left + 14;
    const fits = right + width <= host.width;
    this.tip.style.left = `${Math.max(fits ? right : found.x - host.left - 14 - width, 0)}px`;
    const above = found.y - host.top - height - 8;
    this.tip.style.top = `${found.y - height - 8 < 0 ? found.y - host.top + 18 : above}px`;
  }

  hide() {
    this.tip.hidden = true;
    for (const plot of this.plots ?? []) plot.leave();
  }

  grab(event) {
    const plot = this.plots.find((one) => one.place.contains(event.target));
    this.dragged = false;
    if (plot?.follow && event.button === 0) this.drag = { plot, from: event.clientX };
  }

  release(event) {
    if (this.drag) this.dragged = this.drag.plot.drop(this.drag, event);
    this.drag = null;
  }

  click(event) {
    const found = this.find(event);
    if (this.opens && found?.point && !this.dragged) this.tell(found.point);
  }

  zoomAll() {
    for (const plot of this.plots) plot.look?.(0, 100);
  }

  // The keyboard walks through rows of bars, or through the points of the first plot.
  press(event) {
    const [plot] = this.plots;
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    if (event.key === "Escape") {
      this.zoomAll();
      this.hide();
    } else if (event.key === "Enter") {
      if (this.opens && this.at?.point) this.tell(this.at.point);
    } else if (plot?.look && (event.key === "+" || event.key === "-")) {
      plot.scale(event.key === "+" ? 0.5 : 2);
    } else if (step[event.key]) {
      const [across, down] = step[event.key];
      this.at = plot ? plot.step(across, down) : this.stepRow(across + down);
      this.say(this.at);
      event.preventDefault();
    }
  }

  stepRow(by) {
    const rows = [...this.box.querySelectorAll(".chart-row")];
    const before = this.at?.point?.row ?? (by > 0 ? -1 : rows.length);
    const next = Math.min(Math.max(before + by, 0), rows.length - 1);
    const row = rows[next];
    row.scrollIntoView({ block: "nearest" });
    const box = row.getBoundingClientRect();
    const name = row.querySelector(".chart-name")?.textContent;
    const tips = tipsOf(row);
    return {
      words: name && !tips.length ? [name] : tips.slice(0, MOST_TIPS),
      point: { row: next },
      x: box.left + box.width / 2,
      y: box.top,
    };
  }
}

// Lines and points over an x axis, which zooms.
class Plot {
  constructor(place, data) {
    Object.assign(this, { place, data, from: 0, to: 100, at: null });
    this.svg = place.querySelector("svg");
    this.guide = element("div", "chart-guide");
    this.picked = element("div", "chart-picked");
    this.whole = element("button", "chart-whole");
    this.whole.type = "button";
    this.whole.textContent = "Whole axis";
    this.whole.addEventListener("click", (event) => {
      event.stopPropagation();
      this.look(0, 100);
    });
    this.guide.hidden = this.picked.hidden = this.whole.hidden = true;
    place.append(this.guide, this.picked, this.whole);
  }

  find(clientX, clientY) {
    const box = this.place.getBoundingClientRect();
    const share = (clientX - box.left) / box.width;
    if (share < -0.02 || share > 1.02) return null;
    const x = this.from + share * (this.to - this.from);
    const y = (100 * (clientY - box.top)) / box.height;
    return this.tellOf(this.data.nearest === "point" ? this.nearestPoint(x, y, box) : { x }, box);
  }

  nearestPoint(x, y, box) {
    const perX = box.width / (this.to - this.from);
    const perY = box.height / 100;
    let best = { x, distance: Infinity };
    this.data.series.forEach((series, curve) => series.x.forEach((its, index) => {
      const distance = Math.hypot((its - x) * perX, (series.y[index] - y) * perY);
      if (distance < best.distance) best = { x: its, curve, index, distance };
    }));
    return best;
  }

  // The words about a point, or about all lines at the nearest place.
  tellOf({ x, curve, index }, box) {
    const { series, heads, word, suffix } = this.data;
    const first = series[curve ?? 0];
    const at = index ?? nearest(first.x, x);
    if (at < 0) return null;
    const place = first.x[at];
    const head = heads ? heads[at] : `${word ? `${word} ` : ""}${short(first.at[at])}${suffix}`;
    const said = curve === undefined ? series : [first];
    const words = said.map((one) => {
      const own = one === first ? at : nearest(one.x, place);
      return own < 0 ? "" : `${one.told[own]}${one.label ? ` ${one.label}` : ""}`;
    });
    const left = (place - this.from) / (this.to - this.from);
    this.guide.hidden = left < 0 || left > 1;
    this.guide.style.left = `${100 * left}%`;
    this.at = { curve: curve ?? 0, index: at };
    return {
      words: [head, ...words.filter(Boolean)].filter(Boolean),
      point: { row: at, column: first.at[at], curve: curve ?? 0 },
      x: box.left + left * box.width,
      y: box.top + (box.height * first.y[at]) / 100,
    };
  }

  step(across, down) {
    const { series } = this.data;
    const before = this.at ?? { curve: 0, index: across > 0 ? -1 : series[0].x.length };
    const isLoose = this.data.nearest === "point";
    const curve = isLoose ? clamp(before.curve + down, 0, series.length - 1) : 0;
    const index = clamp(before.index + across, 0, series[curve].x.length - 1);
    const x = series[curve].x[index];
    if (x < this.from || x > this.to) this.look(x - (this.to - this.from) / 2, x + (this.to - this.from) / 2);
    return this.tellOf({ x, index, curve: isLoose ? curve : undefined }, this.place.getBoundingClientRect());
  }

  leave() {
    this.guide.hidden = true;
  }

  follow(drag, event) {
    if (Math.abs(event.clientX - drag.from) < DRAG_PX) return false;
    const box = this.place.getBoundingClientRect();
    const edges = [drag.from, event.clientX].map((x) => clamp(x - box.left, 0, box.width));
    edges.sort((one, other) => one - other);
    this.picked.hidden = false;
    this.picked.style.left = `${edges[0]}px`;
    this.picked.style.width = `${edges[1] - edges[0]}px`;
    drag.shares = edges.map((edge) => edge / box.width);
    return true;
  }

  drop(drag) {
    this.picked.hidden = true;
    if (!drag.shares) return false;
    const length = this.to - this.from;
    this.look(...drag.shares.map((share) => this.from + share * length));
    return true;
  }

  scale(factor) {
    const first = this.data.series[this.at?.curve ?? 0];
    const middle = this.at ? first.x[this.at.index] : (this.from + this.to) / 2;
    const half = ((this.to - this.from) * factor) / 2;
    this.look(middle - half, middle + half);
  }

  // Show a part of the x axis, in percent of the whole.
  look(from, to) {
    const length = clamp(to - from, LEAST_VIEW, 100);
    this.from = clamp(from, 0, 100 - length);
    this.to = this.from + length;
    this.svg.setAttribute("viewBox", `${this.from} 0 ${length} 100`);
    const placed = (x) => (100 * (x - this.from)) / length;
    for (const box of this.place.querySelectorAll("[data-x]")) {
      const start = placed(Number(box.dataset.x));
      const end = placed(Number(box.dataset.x) + Number(box.dataset.w ?? 0));
      const isClipped = box.parentElement.classList.contains("chart-clip");
      const [left, right] = isClipped ? [start, end] : [Math.max(start, 0), Math.min(end, 100)];
      box.hidden = end < 0 || start > 100;
      box.style.left = `${left}%`;
      if (box.dataset.w) box.style.width = `${right - left}%`;
    }
    this.drawTicks(placed);
    this.guide.hidden = true;
    this.whole.hidden = length === 100;
  }

  drawTicks(placed) {
    const { first, last, suffix, word, isWhole } = this.data;
    const perPercent = (last - first) / 100;
    const low = first + this.from * perPercent;
    const high = first + this.to * perPercent;
    const rough = (high - low) / 6;
    const power = 10 ** Math.floor(Math.log10(rough));
    const factor = [1, 2, 5, 10].find((one) => one * power >= rough * 0.999);
    const distance = isWhole ? Math.max(Math.round(factor * power), 1) : factor * power;
    for (const tick of this.place.querySelectorAll(".chart-x")) tick.remove();
    for (let at = Math.ceil(low / distance); at * distance <= high; at += 1) {
      const tick = element("span", "chart-x");
      const isFirst = at === Math.ceil(low / distance);
      tick.textContent = `${isWhole && isFirst && word ? `${word} ` : ""}${short(at * distance)}${suffix}`;
      tick.style.left = `${placed((at * distance - first) / perPercent)}%`;
      this.place.append(tick);
    }
  }
}

// A map of cells.
class HeatMap {
  constructor(place, data) {
    Object.assign(this, { place, data, at: null });
    const bytes = Uint8Array.from(atob(data.values), (letter) => letter.charCodeAt(0));
    this.values = new Float32Array(bytes.buffer);
    this.cell = element("div", "chart-marked");
    this.cell.hidden = true;
    place.append(this.cell);
    this.paint(place.querySelector("canvas"));
  }

  paint(canvas) {
    const { rows, columns, low, high, colours } = this.data;
    canvas.width = columns.length;
    canvas.height = rows.length;
    const image = new ImageData(columns.length, rows.length);
    const stops = colours.map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
    this.values.forEach((value, at) => {
      if (Number.isNaN(value)) return;
      const share = clamp((value - low) / (high - low || 1), 0, 1) * (stops.length - 1);
      const below = Math.min(Math.floor(share), stops.length - 2);
      for (let channel = 0; channel < 3; channel += 1) {
        const [start, end] = [stops[below][channel], stops[below + 1][channel]];
        image.data[4 * at + channel] = start + (share - below) * (end - start);
      }
      image.data[4 * at + 3] = 255;
    });
    canvas.getContext("2d").putImageData(image, 0, 0);
  }

  find(clientX, clientY) {
    const { rows, columns } = this.data;
    const box = this.place.getBoundingClientRect();
    const column = Math.floor(((clientX - box.left) / box.width) * columns.length);
    const row = Math.floor(((clientY - box.top) / box.height) * rows.length);
    if (column < 0 || row < 0 || column >= columns.length || row >= rows.length) return null;
    return { ...this.tellOf(row, column), x: clientX, y: clientY };
  }

  tellOf(row, column) {
    const { rows, columns, rowWord, columnWord, suffix, notes } = this.data;
    const value = this.values[row * columns.length + column];
    const said = Number.isNaN(value) ? "unknown" : `${digits(value)}${suffix}`;
    const words = [`${rowWord} ${rows[row]}, ${columnWord} ${columns[column]}`, said];
    if (notes) words.push(notes[row][column]);
    this.at = { row, column };
    return { words, point: { row: rows[row], column: columns[column] } };
  }

  step(across, down) {
    const { rows, columns } = this.data;
    const row = clamp((this.at?.row ?? 0) + down, 0, rows.length - 1);
    const column = clamp((this.at?.column ?? 0) + across, 0, columns.length - 1);
    const box = this.place.getBoundingClientRect();
    this.cell.hidden = false;
    Object.assign(this.cell.style, {
      left: `${(100 * column) / columns.length}%`,
      width: `${100 / columns.length}%`,
      top: `${(100 * row) / rows.length}%`,
      height: `${100 / rows.length}%`,
    });
    return {
      ...this.tellOf(row, column),
      x: box.left + ((column + 0.5) / columns.length) * box.width,
      y: box.top + (row / rows.length) * box.height,
    };
  }

  leave() {
    this.cell.hidden = true;
  }
}

function element(name, kind) {
  const made = document.createElement(name);
  made.className = kind;
  return made;
}

function tipsOf(row) {
  return [...row.querySelectorAll("[data-tip].chart-fill")].map((one) => one.dataset.tip);
}

function clamp(value, low, high) {
  return Math.min(Math.max(value, low), high);
}

// The position of the nearest value in ascending values; -1 if there is none.
function nearest(values, wanted) {
  let low = 0;
  let high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1;
    else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

function short(value) {
  return Number(value.toPrecision(6)).toLocaleString("en-US", { maximumSignificantDigits: 6 });
}

function digits(value) {
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumSignificantDigits: 3 });
}
