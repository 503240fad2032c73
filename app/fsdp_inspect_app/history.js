// Each choice of the user adds one entry to the browser's history, and nothing else does. Streamlit
// adds an entry whenever the address changes, also for the defaults that a page writes into it. An
// address that changes without a click or a key since the last entry replaces that entry.
(() => {
  let isChosen = false;
  for (const kind of ["pointerdown", "keydown"]) {
    window.addEventListener(kind, () => { isChosen = true; }, true);
  }
  window.addEventListener("popstate", () => { isChosen = false; }, true);
  const push = history.pushState.bind(history);
  history.pushState = (...entry) => {
    if (isChosen) push(...entry);
    else history.replaceState(...entry);
    isChosen = false;
  };
})();
