// A button that opens a search over pages, runs, units and steps. Ctrl+K or Cmd+K opens it, too.

const MOST_SHOWN = 12;
const TYPING_DELAY_MS = 150;

// A step has no entry of its own: a number is the step of the chosen run.
function find(entries, steps, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = entries.filter(({ label, kind }) => {
    const name = `${kind} ${label}`.toLowerCase();
    return words.every((word) => name.includes(word));
  });
  const isWhole = ({ label }) => label.toLowerCase() === text.trim().toLowerCase();
  found.sort((one, other) => isWhole(other) - isWhole(one)); // an equal name leads
  const step = Number((text.match(/^\s*(?:step\s*)?(\d{1,9})\s*$/i) || [])[1]);
  if (steps && step >= steps[0] && step <= steps[1]) {
    found.unshift({ kind: "Step", label: String(step) });
  }
  return found.slice(0, MOST_SHOWN);
}

function makeDialog(choose) {
  const dialog = document.createElement("dialog");
  dialog.className = "fsdp-palette";
  dialog.setAttribute("aria-label", "Open a page, view, run, unit or step");
  const input = document.createElement("input");
  Object.assign(input, { type: "text", placeholder: "Page, run, unit or step", autocomplete: "off" });
  for (const [name, value] of Object.entries({
    role: "combobox", "aria-expanded": "true", "aria-controls": "fsdp-palette-list",
    "aria-label": "Page, run, unit or step",
  })) input.setAttribute(name, value);
  const list = document.createElement("ul");
  list.id = "fsdp-palette-list";
  list.setAttribute("role", "listbox");
  list.setAttribute("aria-label", "Matches");
  dialog.append(input, list);
  let shown = [];
  let at = 0;
  let typing = 0;

  const mark = () => {
    [...list.children].forEach((item, place) => {
      item.setAttribute("aria-selected", String(place === at));
      if (place === at) {
        input.setAttribute("aria-activedescendant", item.id);
        item.scrollIntoView({ block: "nearest" });
      }
    });
  };
  const take = (place) => {
    if (!shown[place]) return;
    dialog.close();
    choose(shown[place]);
  };
  // The runs that are here, and those that the server found for this text.
  const listRuns = () => {
    const { found } = dialog;
    const others = found && found.text === input.value ? found.runs : [];
    const labels = new Set([...(document.fsdpRuns || []), ...others]);
    return [...labels].map((label) => ({ kind: "Run", label }));
  };
  const show = () => {
    shown = find([...dialog.entries, ...listRuns()], dialog.steps, input.value);
    at = Math.max(Math.min(at, shown.length - 1), 0);
    list.replaceChildren(...shown.map(({ kind, label }, place) => {
      const item = document.createElement("li");
      item.id = `fsdp-palette-${place}`;
      item.setAttribute("role", "option");
      const small = document.createElement("small");
      small.textContent = kind;
      item.append(label, small);
      item.addEventListener("click", () => take(place));
      return item;
    }));
    if (!shown.length) {
      const none = document.createElement("li");
      none.textContent = "No match";
      list.append(none);
    }
    mark();
  };
  const ask = () => {
    clearTimeout(typing);
    if (dialog.isWhole || !input.value.trim()) return;
    typing = setTimeout(() => dialog.seek(input.value), TYPING_DELAY_MS);
  };
  input.addEventListener("input", () => {
    at = 0;
    show();
    ask();
  });
  dialog.refresh = () => {
    if (dialog.open && dialog.found && dialog.found.text === input.value) show();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const move = event.key === "ArrowDown" ? 1 : shown.length - 1;
      at = shown.length ? (at + move) % shown.length : 0;
      mark();
    } else if (event.key === "Enter") {
      event.preventDefault();
      take(at);
    }
  });
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close(); // beside the box
  });
  dialog.open_ = () => {
    input.value = "";
    at = 0;
    show();
    dialog.showModal();
    input.focus();
  };
  return dialog;
}

function build(parentElement) {
  const dialog = makeDialog((entry) => dialog.choose(entry));
  const button = document.createElement("button");
  button.type = "button";
  button.className = "fsdp-palette-button";
  const keys = document.createElement("kbd");
  keys.textContent = navigator.platform.startsWith("Mac") ? "⌘ K" : "Ctrl K";
  button.append("Go to", keys);
  button.addEventListener("click", () => dialog.open_());
  parentElement.replaceChildren(button, dialog);
  parentElement.palette = dialog;
  return dialog;
}

export default function commandPalette({
  data, parentElement, setStateValue, setTriggerValue,
}) {
  // A page that refreshes itself calls this again: an open dialog must stay open.
  const dialog = parentElement.palette || build(parentElement);
  dialog.entries = data.entries;
  dialog.steps = data.steps;
  dialog.isWhole = data.isWhole;
  dialog.found = data.found;
  dialog.choose = (entry) => setTriggerValue("chosen", entry);
  dialog.seek = (text) => setStateValue("sought", text);
  dialog.refresh();
  const listen = (event) => {
    if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      if (!dialog.open) dialog.open_();
    }
  };
  document.addEventListener("keydown", listen, true);
  return () => document.removeEventListener("keydown", listen, true);
}
