// When is a page there? Runs before its own scripts, and looks at every frame.
//
// Times are milliseconds since the navigation began. `window.visit` holds:
//   bootedMs       the websocket is open: Streamlit's own start is over
//   answeredMs     the frame in which the headline first had words
//   interactiveMs  the last of 9 frames in a row, each shorter than 60 ms, with everything drawn, the
//                  script ended and no message from the server since the frame before; null until
//                  then, and again as soon as a message arrives or something is drawn anew
//   worstFrameMs   the longest frame since the answer
(() => {
  const CALM_FRAMES = 9;
  const CALM_FRAME_MS = 60;
  const visit = { bootedMs: null, answeredMs: null, interactiveMs: null, worstFrameMs: 0 };
  window.visit = visit;

  const shadows = [];
  const attachShadow = Element.prototype.attachShadow;
  Element.prototype.attachShadow = function (options) {
    const root = attachShadow.call(this, options);
    shadows.push(root);
    return root;
  };

  let messages = 0;
  window.WebSocket = class extends window.WebSocket {
    constructor(...given) {
      super(...given);
      this.addEventListener("open", () => (visit.bootedMs ??= performance.now()));
      this.addEventListener("message", () => (messages += 1));
    }
  };

  const hasAnswer = () => {
    const headline = document.querySelector(".st-key-headline");
    return headline !== null && headline.textContent.trim() !== "";
  };
  const isDrawn = () =>
    document.querySelector(".stApp")?.dataset.testScriptState === "notRunning" &&
    !document.querySelector('[data-testid="stSkeleton"]') &&
    [...document.querySelectorAll("[class*=st-key-chart-]")].every((chart) =>
      chart.querySelector(".chart")?.childElementCount
    ) &&
    shadows
      .filter((root) => root.host.isConnected)
      .flatMap((root) => [...root.querySelectorAll("canvas")])
      .every((canvas) => canvas.dataset.complete === "true");

  let before = performance.now();
  let seen = 0;
  let calm = 0;
  const look = (now) => {
    const frameMs = now - before;
    const isQuiet = messages === seen && visit.answeredMs !== null && isDrawn();
    before = now;
    seen = messages;
    if (visit.answeredMs === null) {
      if (hasAnswer()) visit.answeredMs = now;
    } else {
      visit.worstFrameMs = Math.max(visit.worstFrameMs, frameMs);
    }
    if (!isQuiet) {
      calm = 0;
      visit.interactiveMs = null;
    } else if (visit.interactiveMs === null) {
      calm = frameMs < CALM_FRAME_MS ? calm + 1 : 0;
      if (calm === CALM_FRAMES) visit.interactiveMs = now;
    }
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
})();
