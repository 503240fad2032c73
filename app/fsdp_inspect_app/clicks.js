// Which point of a chart was clicked? Plotly says so of every kind of point, cells of maps included,
// to whoever listens on the chart's element.

export default function followClicks({ data, parentElement, setTriggerValue }) {
  const pointer = document.createElement("style");
  pointer.textContent = `.st-key-${data.chart} .nsewdrag { cursor: pointer !important; }`;
  parentElement.replaceChildren(pointer);
  const tell = ({ points: [point] }) => setTriggerValue("point", {
    x: point.x, y: point.y, curve: point.curveNumber,
  });
  // The chart may be drawn anew at any time, so it is looked for when a pointer goes down on it.
  const attend = ({ target }) => {
    const chart = target.closest && target.closest(`.st-key-${data.chart} .js-plotly-plot`);
    if (!chart) return;
    if (!chart.tellOfClick) chart.on("plotly_click", (click) => chart.tellOfClick(click));
    chart.tellOfClick = tell;
  };
  document.addEventListener("pointerdown", attend, true);
  return () => document.removeEventListener("pointerdown", attend, true);
}
