// Where does each lane lie? Ranks that are pinned stay at the top; the others scroll below them.

const AXIS_HEIGHT = 26;
const FOOT_HEIGHT = 14;
const HEADING_HEIGHT = 22;
const LANE_HEIGHTS = { marks: 13, clock: 28, stops: 20, collective: 20, memory: 46 };
const DIFFERENCE_HEIGHT = 40;
const RANK_GAP = 10;
const LANE_GAP = 3;
const MOST_PINNED = 0.6; // of the height; more than that scrolls with the rest

class Layout {
  // maxHeight: of the canvas; pinned: positions of blocks, in the order in which they were pinned.
  constructor(header, pinned, maxHeight) {
    this.top = [];
    this.height = [];
    this.blockOf = [];
    this.headings = [];
    this.blocks = header.blocks;
    this.differenceTop = NONE; // the strip below the lanes of the compared rank
    const others = header.blocks.map((_, block) => block).filter((block) => !pinned.includes(block));
    let y = AXIS_HEIGHT;
    for (const block of pinned) y = this.place(header, block, y, true);
    this.fixedBottom = pinned.length ? y : AXIS_HEIGHT;
    let heading = "";
    for (const block of others) {
      const { title } = header.blocks[block];
      y = this.place(header, block, y, title !== heading);
      heading = title;
    }
    this.bottom = y;
    this.canvasHeight = Math.min(y + FOOT_HEIGHT, Math.max(maxHeight, 240));
    if (this.fixedBottom > MOST_PINNED * this.canvasHeight && others.length) {
      this.fixedBottom = AXIS_HEIGHT;
    }
    this.maxScroll = Math.max(0, y + FOOT_HEIGHT - this.canvasHeight);
  }

  place(header, block, from, hasHeading) {
    const { title, first_lane: first, last_lane: last } = header.blocks[block];
    let y = from;
    if (title && hasHeading) {
      this.headings.push({ text: title, y: y + HEADING_HEIGHT / 2, block });
      y += HEADING_HEIGHT;
    }
    for (let lane = first; lane <= last; lane += 1) {
      this.top[lane] = y;
      this.height[lane] = LANE_HEIGHTS[header.lanes[lane].kind];
      this.blockOf[lane] = block;
      y += this.height[lane] + LANE_GAP;
    }
    if (header.difference && header.difference.block === block) {
      this.differenceTop = y;
      y += DIFFERENCE_HEIGHT + LANE_GAP;
    }
    return y + RANK_GAP;
  }

  isFixed(y) {
    return y < this.fixedBottom;
  }

  // Where a height of the whole picture is on the canvas.
  shown(y, scroll) {
    return this.isFixed(y) ? y : y - scroll;
  }

  isDifferenceAt(y, scroll) {
    if (this.differenceTop === NONE) return false;
    const inPicture = y < this.fixedBottom ? y : y + scroll;
    return inPicture >= this.differenceTop && inPicture < this.differenceTop + DIFFERENCE_HEIGHT;
  }

  laneAt(y, scroll) {
    const inPicture = y < this.fixedBottom ? y : y + scroll;
    for (let lane = 0; lane < this.top.length; lane += 1) {
      const top = this.top[lane];
      if (inPicture >= top && inPicture < top + this.height[lane] + LANE_GAP) return lane;
    }
    return NONE;
  }
}
