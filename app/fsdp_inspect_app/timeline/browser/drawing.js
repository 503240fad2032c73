// What did the server send? The packed block of packing.py, taken apart and indexed.

const NONE = -1;
const ARRAYS = {
  f8: Float64Array, f4: Float32Array, i4: Int32Array, i2: Int16Array, u2: Uint16Array,
  i1: Int8Array, u1: Uint8Array,
};

class Drawing {
  constructor(bytes) {
    const { header, columns } = unpack(bytes);
    this.header = header;
    this.columns = columns;
    this.ranges = indexLanes(columns.lane, header.lanes.length);
    this.curves = indexCurves(header.memory);
    this.pieces = columns.event ? indexEvents(columns.event) : new Map();
    const { units, looks, blocks } = header.highlight || {};
    this.highlight = header.highlight && {
      units: units && new Set(units), looks: looks && new Set(looks), blocks: blocks && new Set(blocks),
    };
    this.hatches = header.looks.map((look) => (look.hatched ? hatch() : null));
  }

  get length() {
    return this.columns.lane.length;
  }

  laneOf(position) {
    return this.header.lanes[this.columns.lane[position]];
  }

  blockOf(lane) {
    return this.header.blocks.findIndex((one) => lane >= one.first_lane && lane <= one.last_lane);
  }

  // The lane of a kind in the block of another lane.
  laneBeside(lane, kind) {
    const { first_lane: first, last_lane: last } = this.header.blocks[this.blockOf(lane)];
    for (let other = first; other <= last; other += 1) {
      if (this.header.lanes[other].kind === kind) return other;
    }
    return NONE;
  }

  end(position) {
    return this.columns.start[position] + this.columns.duration[position];
  }

  // What is drawn, by name: label, colour (none: the theme's), and how it looks.
  legend() {
    const { looks, legend, memory } = this.header;
    const entries = [];
    for (const { label, colour, hatched } of legend.map((position) => looks[position])) {
      const kind = hatched ? "hatched" : "";
      const same = entries.find((entry) => entry.colour === colour && entry.kind === kind);
      if (same) same.label += `, ${label}`; // the stops of the host, which name themselves
      else entries.push({ label, colour, kind });
    }
    if (memory.length) entries.push({ label: "memory allocated", kind: "area" });
    if (memory.some((curve) => curve.has_reserved)) entries.push({ label: "reserved", kind: "line" });
    const { difference } = this.header;
    if (difference) entries.push({ label: difference.label, kind: "difference" });
    return entries;
  }

  // The rectangle of a lane that meets a time, or is less than `slack` away from it.
  spanAt(lane, time, slack) {
    const { start } = this.columns;
    const [low, high] = this.ranges[lane];
    let best = NONE;
    let bestGap = slack;
    let position = Math.max(lastStartingBefore(start, low, high, time + slack), low);
    for (; position >= low && position < high; position -= 1) {
      const gap = Math.max(start[position] - time, time - this.end(position), 0);
      if (gap <= bestGap) {
        best = position;
        bestGap = gap;
      }
      if (this.end(position) < time - slack || gap === 0) break;
    }
    return best;
  }

  // The last reading of a memory lane at or before a time; the first one before all.
  readingAt(lane, time) {
    const curve = this.curves.get(lane);
    if (!curve) return NONE;
    const last = lastStartingBefore(this.columns.memory_time, curve.low, curve.high, time);
    return Math.max(last, curve.low);
  }

  nameOf(position) {
    const { unit } = this.columns;
    return unit && unit[position] !== NONE ? this.header.units[unit[position]] : "";
  }

  // Whether a search does not cover a rectangle. A pixel column has no unit.
  isFaded(position) {
    if (!this.highlight) return false;
    const { units, looks, blocks } = this.highlight;
    const { unit, look, lane } = this.columns;
    return Boolean((units && unit && !units.has(unit[position]))
      || (looks && !looks.has(look[position]))
      || (blocks && !blocks.has(this.blockOf(lane[position]))));
  }

  // The rectangle of an event that shows it best: its collective, else its longest piece.
  bodyOf(event) {
    const pieces = this.pieces.get(event) || [];
    const collective = pieces.find((piece) => this.laneOf(piece).kind === "collective");
    if (collective !== undefined) return collective;
    const { duration } = this.columns;
    return pieces.reduce((best, piece) => (
      best === NONE || duration[piece] > duration[best] ? piece : best), NONE);
  }

  // The all-gather whose parameters a forward or backward needed; NONE where it is not here.
  gatherFor(position) {
    const { columns, header } = this;
    const block = header.blocks[this.blockOf(columns.lane[position])];
    const begin = columns.start[position] + columns.event_start[position];
    let best = NONE;
    let bestNeed = -Infinity;
    for (let lane = block.first_lane; lane <= block.last_lane; lane += 1) {
      if (header.lanes[lane].kind !== "collective" || header.lanes[lane].label !== "all-gather") {
        continue;
      }
      for (let other = this.ranges[lane][0]; other < this.ranges[lane][1]; other += 1) {
        const need = columns.start[other] + columns.need[other];
        const isOwn = columns.unit[other] === columns.unit[position] && columns.bytes[other] >= 0;
        if (isOwn && need <= begin && need > bestNeed) {
          best = other;
          bestNeed = need;
        }
      }
    }
    return best;
  }

  // From the issue to the collective, and from its end to where its result was needed.
  arrowsOf(event) {
    const body = this.bodyOf(event);
    if (body === NONE) return [];
    const { columns } = this;
    const kind = this.laneOf(body).kind;
    let collective = body;
    if (kind === "clock" && columns.bytes[body] < 0) {
      collective = columns.unit[body] === NONE ? NONE : this.gatherFor(body);
    }
    if (collective === NONE || columns.bytes[collective] < 0) return [];
    const start = columns.start[collective];
    const lane = columns.lane[collective];
    const arrows = [];
    const marks = this.laneBeside(lane, "marks");
    const issue = { lane: marks, time: start + columns.issue[collective] };
    if (marks !== NONE) arrows.push({ from: issue, to: { lane, time: start } });
    const end = start + columns.event_end[collective];
    if (!Number.isNaN(columns.need[collective])) {
      const needed = Math.max(end, start + columns.need[collective]);
      const clock = this.laneBeside(lane, "clock");
      arrows.push({ from: { lane, time: end }, to: { lane: clock, time: needed } });
    }
    return arrows;
  }

  // What a tooltip says about a rectangle: pairs of label and value, the title first.
  describe(position) {
    const { header, columns } = this;
    const look = header.looks[columns.look[position]];
    const lane = this.laneOf(position);
    const block = header.blocks[this.blockOf(columns.lane[position])];
    const label = lane.kind === "marks" ? `${look.label} issued` : look.label;
    const title = [label, this.nameOf(position)].filter(Boolean).join(" · ");
    const rows = [[title, ""], ["rank", this.nameOfBlock(block)]];
    if (!header.is_exact) return [...rows, ...this.describeDensity(position, lane)];
    const length = columns.event_end[position] - columns.event_start[position];
    if (lane.kind !== "marks") {
      rows.push(["duration", formatNs(columns.duration[position])]);
      if (Math.abs(length - columns.duration[position]) > 0.001 * length) {
        rows.push(["of", formatNs(length)]);
      }
    }
    rows.push(["start", formatNs(columns.start[position])]);
    const phase = header.phases[columns.phase[position]];
    if (phase) rows.push(["phase", phase]);
    if (columns.bytes[position] >= 0) rows.push(...this.describeTransfer(position));
    rows.push(["obtained", header.provenances[columns.provenance[position]]]);
    return rows;
  }

  describeChange({ name, phase, delta_ns: delta, own_ns: own, other_ns: other }) {
    const word = delta > 0 ? "slower" : "faster";
    return [
      [`${name} · ${phase}`, ""], [`${word} by`, formatNs(Math.abs(delta))],
      ["this run", formatNs(own)], ["B", formatNs(other)],
    ];
  }

  nameOfBlock(block) {
    return block.title ? `${block.rank} (${block.title})` : String(block.rank);
  }

  describeDensity(position, lane) {
    const length = formatNs(this.columns.duration[position]);
    const busy = Math.round((this.columns.shade[position] / 255) * 100);
    const rows = lane.kind === "marks" ? [["within", length]]
      : [["busy", `up to ${busy}% of ${length}`]];
    return [...rows, ["", `too many to tell apart${this.header.is_saved ? "" : ": click to zoom in"}`]];
  }

  describeTransfer(position) {
    const { header, columns } = this;
    const rows = [["message", formatBytes(columns.bytes[position])]];
    const rate = columns.bus_bytes_per_s[position];
    if (rate >= 0) rows.push(["bus bandwidth", formatRate(rate)]);
    rows.push(["exposed", formatNs(columns.exposed[position])]);
    const lead = columns.need[position] - columns.issue[position];
    rows.push(["issued", describeLead(lead)]);
    const issuer = columns.issued_by[position];
    if (issuer !== NONE && issuer !== columns.unit[position]) {
      rows.push(["issued by", header.units[issuer]]);
    }
    return rows;
  }

  describeReading(lane, reading) {
    const { header, columns } = this;
    const block = header.blocks[this.blockOf(lane)];
    const allocated = columns.memory_allocated[reading];
    const highest = columns.memory_highest[reading];
    const reserved = columns.memory_reserved[reading];
    const rows = [["memory", ""], ["rank", this.nameOfBlock(block)]];
    rows.push(["allocated", formatBytes(allocated)]);
    if (highest > allocated) rows.push(["highest since the last reading", formatBytes(highest)]);
    if (reserved >= 0) rows.push(["reserved", formatBytes(reserved)]);
    const unit = columns.memory_unit[reading];
    const phase = header.phases[columns.memory_phase[reading]];
    rows.push(["read in", [unit === NONE ? "" : header.units[unit], phase].filter(Boolean).join(", ")]);
    rows.push(["read at", `${formatNs(columns.memory_time[reading])}, by the host's clock`]);
    return rows;
  }
}

// How long before it was needed a collective was issued.
function describeLead(lead) {
  if (Number.isNaN(lead)) return "nobody is known to have waited for it";
  if (lead === 0) return "when it was needed";
  return `${formatNs(Math.abs(lead))} ${lead < 0 ? "after" : "before"} it was needed`;
}

function unpack(bytes) {
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

// The range of rectangles of each lane; rectangles are sorted by lane.
function indexLanes(lanes, numLanes) {
  const ranges = Array.from({ length: numLanes }, () => [0, 0]);
  let low = 0;
  for (let lane = 0; lane < numLanes; lane += 1) {
    let high = low;
    while (high < lanes.length && lanes[high] === lane) high += 1;
    ranges[lane] = [low, high];
    low = high;
  }
  return ranges;
}

// By lane: what the header says of its memory, and the range of its readings.
function indexCurves(described) {
  const curves = new Map();
  let low = 0;
  for (const curve of described) {
    curves.set(curve.lane, { ...curve, low, high: low + curve.count });
    low += curve.count;
  }
  return curves;
}

function indexEvents(events) {
  const pieces = new Map();
  events.forEach((event, position) => {
    const known = pieces.get(event);
    if (known) known.push(position);
    else pieces.set(event, [position]);
  });
  return pieces;
}

// The last value of [low, high) that is at or before a time; low - 1 if there is none.
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

function hatch() {
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
