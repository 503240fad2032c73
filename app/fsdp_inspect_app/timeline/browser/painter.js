// How does a drawing look? Everything that is put on the canvas, as it is now.

const WIDE_GUTTER = 172;
const NARROW_GUTTER = 142;
const PHONE_GUTTER = 112;
const MIN_LABEL_WIDTH = 16;
const LEAST_WIDTHS = { marks: 1.6, stops: 2.5 }; // of what may have no duration
const FADED = 0.2;
const AREA_ALPHA = 0.34;
const ARROW_HEAD = 6;
const RANK_NAME_WIDTH = 44;

class Painter {
  // scene: drawing, layout, view, width, height, scroll, colours, font, hovered, selected (an
  // event), ruler, pinned (positions of blocks)
  constructor(pen, scene) {
    this.pen = pen;
    Object.assign(this, scene);
    this.gutter = gutterOf(this.width);
  }

  paint() {
    const { pen } = this;
    pen.clearRect(0, 0, this.width, this.height);
    pen.fillStyle = this.colours.background;
    pen.fillRect(0, 0, this.width, this.height);
    const { fixedBottom } = this.layout;
    this.paintPart(fixedBottom, this.height - FOOT_HEIGHT, false);
    if (fixedBottom > AXIS_HEIGHT) {
      this.paintPart(AXIS_HEIGHT, fixedBottom - RANK_GAP / 2, true);
      this.drawPinnedEdge();
    }
    this.drawAxisLabels();
    this.drawArrows();
    this.drawRuler();
    this.drawScrollBars();
  }

  xOf(time) {
    const { start, end } = this.view;
    return this.gutter + ((time - start) / (end - start)) * (this.width - this.gutter);
  }

  yOf(lane) {
    return this.layout.shown(this.layout.top[lane], this.scroll);
  }

  // The pinned ranks, or all others, inside their part of the canvas.
  paintPart(top, bottom, isFixed) {
    const { pen, layout } = this;
    const lanes = this.drawing.header.lanes.map((_, lane) => lane)
      .filter((lane) => layout.isFixed(layout.top[lane]) === isFixed)
      .filter((lane) => this.yOf(lane) < bottom && this.yOf(lane) + layout.height[lane] > top);
    this.clip(0, top, this.width, bottom - top, () => lanes.forEach((lane) => this.drawLane(lane)));
    this.clip(this.gutter, top, this.width - this.gutter, bottom - top, () => {
      this.drawTicks(top, bottom);
      lanes.forEach((lane) => this.drawRectangles(lane));
      lanes.forEach((lane) => this.drawCurve(lane));
      this.drawStepEnds(isFixed);
      pen.globalAlpha = 1;
      this.drawOutlines(lanes);
    });
    if (layout.differenceTop !== NONE && layout.isFixed(layout.differenceTop) === isFixed) {
      this.clip(0, top, this.width, bottom - top, () => this.drawDifference());
    }
    this.clip(0, top, this.width, bottom - top, () => this.drawHeadings(isFixed));
  }

  clip(x, y, width, height, draw) {
    const { pen } = this;
    pen.save();
    pen.beginPath();
    pen.rect(x, y, width, height);
    pen.clip();
    draw();
    pen.restore();
  }

  // ---- lanes and axis ----

  drawHeadings(isFixed) {
    const { pen, layout } = this;
    pen.font = `600 13px ${this.font}`;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    for (const heading of layout.headings) {
      if (layout.isFixed(heading.y) !== isFixed) continue;
      const text = shortened(pen, heading.text, this.width - 12);
      const y = layout.shown(heading.y, this.scroll);
      pen.fillStyle = this.colours.background;
      pen.fillRect(0, y - 9, pen.measureText(text).width + 8, 18);
      pen.fillStyle = this.colours.text;
      pen.fillText(text, 2, y);
    }
  }

  drawLane(lane) {
    const { pen } = this;
    const { label, row } = this.drawing.header.lanes[lane];
    const top = this.yOf(lane);
    const height = this.layout.height[lane];
    pen.fillStyle = this.colours.band;
    pen.fillRect(this.gutter, top, this.width - this.gutter, height);
    const block = this.drawing.header.blocks[this.layout.blockOf[lane]];
    pen.textBaseline = "middle";
    if (lane === block.first_lane) this.drawRankName(block, this.layout.blockOf[lane], top);
    if (row > 0) return;
    pen.textAlign = "right";
    pen.fillStyle = this.colours.faint;
    pen.font = `12px ${this.font}`;
    const isFirst = lane === block.first_lane;
    const y = isFirst ? top + 7 : top + height / 2;
    const room = this.gutter - 16 - (isFirst ? RANK_NAME_WIDTH : 0);
    pen.fillText(shortened(pen, label, room), this.gutter - 8, y + 0.5);
  }

  // Above the middle line this run is slower than the other one, below it faster.
  drawDifference() {
    const { pen, layout } = this;
    const { spans } = this.drawing.header.difference;
    const top = layout.shown(layout.differenceTop, this.scroll);
    const middle = top + DIFFERENCE_HEIGHT / 2;
    const half = DIFFERENCE_HEIGHT / 2 - 2;
    pen.fillStyle = this.colours.band;
    pen.fillRect(this.gutter, top, this.width - this.gutter, DIFFERENCE_HEIGHT);
    pen.fillStyle = this.colours.faint;
    pen.font = `12px ${this.font}`;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText("slower than B", this.gutter - 8, top + 10);
    pen.fillText("faster", this.gutter - 8, top + DIFFERENCE_HEIGHT - 10);
    const most = Math.max(...spans.map((span) => Math.abs(span.delta_ns)), 1);
    this.clip(this.gutter, top, this.width - this.gutter, DIFFERENCE_HEIGHT, () => {
      for (const span of spans) this.drawChange(span, middle, half, most);
    });
    pen.fillStyle = this.colours.faint;
    pen.fillRect(this.gutter, Math.round(middle), this.width - this.gutter, 1);
  }

  drawChange({ start_ns: start, end_ns: end, delta_ns: delta }, middle, half, most) {
    const { pen } = this;
    const left = this.xOf(start);
    const width = Math.max(this.xOf(end) - left - 1, 1);
    const height = Math.max((Math.abs(delta) / most) * half, 1);
    pen.fillStyle = this.colours.memory;
    pen.fillRect(left, delta > 0 ? middle - height : middle, width, height);
    const from = Math.max(left, this.gutter) + 3;
    const text = `${delta > 0 ? "+" : "−"}${formatNs(Math.abs(delta))}`;
    pen.font = `11px ${this.font}`;
    pen.textAlign = "left";
    if (pen.measureText(text).width > Math.min(left + width, this.width) - from - 2) return;
    pen.fillStyle = this.colours.text;
    pen.fillText(text, from, delta > 0 ? middle + half / 2 + 1 : middle - half / 2);
  }

  drawRankName(block, position, top) {
    const { pen } = this;
    pen.textAlign = "left";
    pen.fillStyle = this.colours.text;
    pen.font = `600 13px ${this.font}`;
    const name = `rank ${block.rank}`;
    pen.fillText(name, 2, top + 7.5);
    const isPinned = this.pinned.includes(position);
    if (isPinned || this.hoveredBlock === position) {
      this.drawPin(2 + pen.measureText(name).width + 9, top + 7, isPinned);
    }
    pen.font = `11px ${this.font}`;
    pen.fillStyle = this.colours.faint;
    if (block.is_apart) pen.fillText("own clock", 2, top + 24);
  }

  drawPin(x, y, isPinned) {
    const { pen } = this;
    pen.strokeStyle = this.colours.text;
    pen.fillStyle = this.colours.text;
    pen.beginPath();
    pen.arc(x, y - 2, 3.2, 0, 2 * Math.PI);
    if (isPinned) pen.fill();
    pen.stroke();
    pen.beginPath();
    pen.moveTo(x, y + 1);
    pen.lineTo(x, y + 6);
    pen.stroke();
  }

  drawPinnedEdge() {
    const { pen } = this;
    const y = Math.round(this.layout.fixedBottom - RANK_GAP / 2) + 0.5;
    pen.strokeStyle = this.colours.faint;
    pen.beginPath();
    pen.moveTo(0, y);
    pen.lineTo(this.width, y);
    pen.stroke();
  }

  ticks() {
    const { start, end } = this.view;
    const step = tickLength(end - start, this.width - this.gutter);
    const ticks = [];
    for (let tick = Math.ceil(start / step) * step; tick <= end; tick += step) ticks.push(tick);
    return { step, ticks };
  }

  drawTicks(top, bottom) {
    const { pen } = this;
    pen.strokeStyle = this.colours.line;
    pen.lineWidth = 1;
    for (const tick of this.ticks().ticks) {
      const x = Math.round(this.xOf(tick)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, top);
      pen.lineTo(x, bottom);
      pen.stroke();
    }
  }

  drawAxisLabels() {
    const { pen } = this;
    const { step, ticks } = this.ticks();
    pen.font = `11px ${this.font}`;
    pen.textBaseline = "middle";
    pen.textAlign = "left";
    for (const tick of ticks) {
      const x = Math.round(this.xOf(tick)) + 0.5;
      const label = formatTick(tick, step, this.drawing.header.axis_end_ns);
      if (x + 4 + pen.measureText(label).width > this.width) continue;
      pen.strokeStyle = this.colours.line;
      pen.beginPath();
      pen.moveTo(x, AXIS_HEIGHT - 10);
      pen.lineTo(x, AXIS_HEIGHT);
      pen.stroke();
      pen.fillStyle = this.colours.faint;
      pen.fillText(label, x + 4, AXIS_HEIGHT - 13);
    }
  }

  drawStepEnds(isFixed) {
    const { pen, layout } = this;
    pen.strokeStyle = this.colours.faint;
    pen.setLineDash([3, 3]);
    for (const block of this.drawing.header.blocks) {
      if (layout.isFixed(layout.top[block.first_lane]) !== isFixed) continue;
      for (const time of [block.start_ns, block.end_ns]) {
        const x = Math.round(this.xOf(time)) + (time === block.start_ns ? 0.5 : -0.5);
        pen.beginPath();
        pen.moveTo(x, this.yOf(block.first_lane) - 3);
        pen.lineTo(x, this.yOf(block.last_lane) + layout.height[block.last_lane] + 3);
        pen.stroke();
      }
    }
    pen.setLineDash([]);
  }

  // ---- spans ----

  drawRectangles(lane) {
    const { drawing, view } = this;
    const { start } = drawing.columns;
    const [low, high] = drawing.ranges[lane];
    this.pen.font = `11px ${this.font}`;
    this.pen.textAlign = "left";
    this.pen.textBaseline = "middle";
    const { kind } = drawing.header.lanes[lane];
    const isMarked = kind === "marks";
    const isExact = drawing.header.is_exact;
    const least = LEAST_WIDTHS[kind] ?? 0.7;
    let drawnTo = -Infinity;
    // Pixel columns of several looks overlap, and any of them may reach into the window.
    let position = isExact ? Math.max(lastStartingBefore(start, low, high, view.start), low) : low;
    for (; position < high && start[position] < view.end; position += 1) {
      const left = this.xOf(start[position]);
      const right = Math.max(this.xOf(drawing.end(position)), left + least);
      if (right < this.gutter) continue;
      if (isExact && right < drawnTo + 0.3) continue; // too short to be seen beside its neighbour
      drawnTo = right;
      this.drawRectangle(position, lane, left, right - left, isMarked);
    }
    this.pen.globalAlpha = 1;
  }

  drawRectangle(position, lane, left, width, isMarked) {
    const { pen, drawing } = this;
    const look = drawing.header.looks[drawing.columns.look[position]];
    const top = this.yOf(lane);
    const height = this.layout.height[lane];
    const gap = width > 4 ? 1 : 0;
    const shade = isMarked ? 1 : drawing.columns.shade[position] / 255;
    pen.globalAlpha = shade * (drawing.isFaded(position) ? FADED : 1);
    pen.fillStyle = look.colour;
    pen.fillRect(left, top, width - gap, height);
    const hatch = drawing.hatches[drawing.columns.look[position]];
    if (hatch && width > 2) {
      pen.fillStyle = hatch;
      pen.fillRect(left, top, width - gap, height);
    }
    if (drawing.header.is_exact && width > MIN_LABEL_WIDTH) {
      this.drawName(position, look, left, top, width, height);
    }
  }

  drawName(position, look, left, top, width, height) {
    const { pen, drawing } = this;
    const from = Math.max(left, this.gutter) + 4;
    const room = Math.min(left + width, this.width) - from - 3;
    const isNamed = ["clock", "stops"].includes(drawing.laneOf(position).kind);
    const name = drawing.nameOf(position) || (isNamed ? look.label : "");
    const text = shortened(pen, name, room);
    if (!text) return;
    if (look.hatched) {
      pen.fillStyle = look.colour;
      pen.fillRect(from - 3, top + height / 2 - 7, pen.measureText(text).width + 6, 14);
    }
    pen.fillStyle = look.ink;
    pen.fillText(text, from, top + height / 2 + 0.5);
  }

  // ---- memory ----

  drawCurve(lane) {
    const curve = this.drawing.curves.get(lane);
    if (!curve) return;
    const { columns } = this.drawing;
    const top = this.yOf(lane) + 3;
    const room = this.layout.height[lane] - 4;
    const yOf = (bytes) => top + room * (1 - bytes / curve.top_bytes);
    this.fillArea(curve, columns.memory_allocated, yOf, top + room);
    this.drawHighest(curve, yOf);
    this.drawReserved(curve, yOf);
    this.drawPeak(curve, yOf, top);
  }

  // A reading holds until the next one: nothing is known between them but the highest moment.
  fillArea(curve, values, yOf, bottom) {
    const { pen } = this;
    const times = this.drawing.columns.memory_time;
    pen.globalAlpha = AREA_ALPHA;
    pen.fillStyle = this.colours.memory;
    pen.beginPath();
    pen.moveTo(this.xOf(times[curve.low]), bottom);
    for (let reading = curve.low; reading < curve.high; reading += 1) {
      const x = this.xOf(times[reading]);
      if (reading > curve.low) pen.lineTo(x, yOf(values[reading - 1]));
      pen.lineTo(x, yOf(values[reading]));
    }
    pen.lineTo(this.xOf(times[curve.high - 1]), bottom);
    pen.fill();
    pen.globalAlpha = 1;
  }

  // Where more was allocated between two readings than at either of them.
  drawHighest(curve, yOf) {
    const { pen } = this;
    const { memory_time: times, memory_allocated: allocated, memory_highest: highest } =
      this.drawing.columns;
    pen.strokeStyle = this.colours.memory;
    pen.lineWidth = 1.5;
    for (let reading = curve.low + 1; reading < curve.high; reading += 1) {
      if (highest[reading] <= Math.max(allocated[reading], allocated[reading - 1])) continue;
      pen.beginPath();
      pen.moveTo(this.xOf(times[reading - 1]), yOf(highest[reading]));
      pen.lineTo(this.xOf(times[reading]), yOf(highest[reading]));
      pen.stroke();
    }
    pen.lineWidth = 1;
  }

  drawReserved(curve, yOf) {
    const { pen } = this;
    const { memory_time: times, memory_reserved: reserved } = this.drawing.columns;
    pen.strokeStyle = this.colours.text;
    pen.beginPath();
    for (let reading = curve.low; reading < curve.high; reading += 1) {
      if (reserved[reading] < 0) continue;
      const x = this.xOf(times[reading]);
      if (reading > curve.low) pen.lineTo(x, yOf(reserved[reading - 1]));
      pen.lineTo(x, yOf(reserved[reading]));
    }
    pen.stroke();
  }

  drawPeak(curve, yOf, top) {
    const { pen } = this;
    const x = this.xOf(curve.peak_ns);
    const y = yOf(curve.peak_bytes);
    if (x < this.gutter - 1 || x > this.width + 1) return;
    pen.fillStyle = this.colours.text;
    pen.beginPath();
    pen.arc(x, y, 3, 0, 2 * Math.PI);
    pen.fill();
    pen.font = `11px ${this.font}`;
    const [left, right] = [x - this.gutter - 14, this.width - x - 14];
    const text = this.peakWords(curve, Math.max(left, right));
    const room = pen.measureText(text).width;
    const from = right >= room ? x + 8 : x - 8 - room;
    pen.fillStyle = this.colours.background;
    pen.globalAlpha = 0.8;
    pen.fillRect(from - 3, top + 9, room + 6, 15);
    pen.globalAlpha = 1;
    pen.fillStyle = this.colours.text;
    pen.textAlign = "left";
    pen.textBaseline = "middle";
    pen.fillText(text, from, top + 17);
  }

  // As much of where the peak was as there is room for.
  peakWords(curve, room) {
    const peak = `peak ${formatBytes(curve.peak_bytes)}`;
    const candidates = [
      `${peak} · ${curve.peak_unit}, ${curve.peak_phase}`, `${peak} · ${curve.peak_unit}`, peak,
    ];
    return candidates.find((text) => this.pen.measureText(text).width <= room) || peak;
  }

  // ---- what is pointed at and what is selected ----

  get hoveredEvent() {
    const { event } = this.drawing.columns;
    return event && this.hovered !== NONE ? event[this.hovered] : NONE;
  }

  drawOutlines(lanes) {
    const { columns, pieces } = this.drawing;
    for (const event of new Set([this.hoveredEvent, this.selected])) {
      for (const piece of (event !== NONE && pieces.get(event)) || []) {
        const lane = columns.lane[piece];
        if (lanes.includes(lane)) this.outline(piece, lane, event === this.selected);
      }
    }
  }

  outline(position, lane, isStrong) {
    const { pen } = this;
    const left = this.xOf(this.drawing.columns.start[position]);
    const width = Math.max(this.xOf(this.drawing.end(position)) - left, 2);
    pen.strokeStyle = this.colours.text;
    pen.lineWidth = isStrong ? 2 : 1.2;
    pen.strokeRect(left, this.yOf(lane), Math.max(width - 1, 1), this.layout.height[lane]);
    pen.lineWidth = 1;
  }

  drawArrows() {
    const events = new Set([this.hoveredEvent, this.selected]);
    events.delete(NONE);
    const top = AXIS_HEIGHT;
    this.clip(this.gutter, top, this.width - this.gutter, this.height - top - FOOT_HEIGHT, () => {
      for (const event of events) {
        for (const { from, to } of this.drawing.arrowsOf(event)) this.drawArrow(from, to);
      }
    });
  }

  drawArrow(from, to) {
    const { pen } = this;
    const isDown = this.yOf(to.lane) > this.yOf(from.lane);
    const edge = (lane, atBottom) => this.yOf(lane) + (atBottom ? this.layout.height[lane] : 0);
    const [x0, y0] = [this.xOf(from.time), edge(from.lane, isDown)];
    const [x1, y1] = [this.xOf(to.time), edge(to.lane, !isDown)];
    const bend = (y1 - y0) * 0.5;
    for (const [colour, width] of [[this.colours.background, 4], [this.colours.text, 1.6]]) {
      pen.strokeStyle = colour;
      pen.lineWidth = width;
      pen.beginPath();
      pen.moveTo(x0, y0);
      pen.bezierCurveTo(x0, y0 + bend, x1, y1 - bend, x1, y1);
      pen.stroke();
    }
    pen.lineWidth = 1;
    pen.fillStyle = this.colours.text;
    const back = isDown ? -ARROW_HEAD : ARROW_HEAD;
    pen.beginPath();
    pen.moveTo(x1, y1);
    pen.lineTo(x1 - ARROW_HEAD / 1.6, y1 + back);
    pen.lineTo(x1 + ARROW_HEAD / 1.6, y1 + back);
    pen.fill();
  }

  drawRuler() {
    if (!this.ruler) return;
    const { pen } = this;
    const { block } = this.ruler;
    const [left, right] = [this.ruler.start, this.ruler.end].map((time) => this.xOf(time))
      .sort((a, b) => a - b);
    const bottom = this.height - FOOT_HEIGHT;
    this.clip(this.gutter, 0, this.width - this.gutter, bottom, () => {
      pen.globalAlpha = 0.14;
      pen.fillStyle = this.colours.text;
      pen.fillRect(left, AXIS_HEIGHT, right - left, bottom - AXIS_HEIGHT);
      pen.globalAlpha = 1;
      this.outlineRanks(block, left, right);
      const length = formatNs(Math.abs(this.ruler.end - this.ruler.start));
      const label = `${length}, rank ${this.drawing.header.blocks[block].rank}`;
      pen.font = `600 12px ${this.font}`;
      const width = pen.measureText(label).width + 10;
      const middle = (Math.max(left, this.gutter) + Math.min(right, this.width)) / 2;
      pen.fillRect(middle - width / 2, AXIS_HEIGHT + 2, width, 18);
      pen.fillStyle = this.colours.background;
      pen.textAlign = "left";
      pen.textBaseline = "middle";
      pen.fillText(label, middle - width / 2 + 5, AXIS_HEIGHT + 11.5);
    });
  }

  // The lanes whose times are summed.
  outlineRanks(block, left, right) {
    const { first_lane: first, last_lane: last } = this.drawing.header.blocks[block];
    const top = Math.max(this.yOf(first) - 2, AXIS_HEIGHT);
    const bottom = this.yOf(last) + this.layout.height[last] + 2;
    this.pen.strokeStyle = this.colours.text;
    if (bottom > top) this.pen.strokeRect(left, top, right - left, bottom - top);
  }

  drawScrollBars() {
    const { pen, layout } = this;
    const axisEnd = this.drawing.header.axis_end_ns;
    const length = this.view.end - this.view.start;
    pen.fillStyle = this.colours.faint;
    if (length < axisEnd) {
      const room = this.width - this.gutter;
      const left = this.gutter + (this.view.start / axisEnd) * room;
      pen.fillRect(left, this.height - 6, Math.max((length / axisEnd) * room, 6), 4);
    }
    if (layout.maxScroll > 0) {
      const shown = this.height - layout.fixedBottom;
      const share = shown / (shown + layout.maxScroll);
      const top = layout.fixedBottom + (this.scroll / (shown + layout.maxScroll)) * shown;
      pen.fillRect(this.width - 4, top, 4, Math.max(share * shown, 12));
    }
  }
}

function gutterOf(width) {
  if (width < 480) return PHONE_GUTTER;
  return width < 760 ? NARROW_GUTTER : WIDE_GUTTER;
}
