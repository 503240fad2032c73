// A button that opens a search over pages, runs, units and steps. Ctrl+K or Cmd+K opens it, too.

const MOST_SHOWN = 12;

// A step has no entry of its own: a number is the step of the chosen run.
function find(entries, steps, text) {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const found = entries.filter(({ label, kind }) => {
    const name = `${kind} ${label}`.toLowerCase();
    return words.every((word) => name.includes(word));
  });
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
  const show = () => {
    const runs = (document.fsdpRuns || []).map((label) => ({ kind: "Run", label }));
    shown = find([...dialog.entries, ...runs], dialog.steps, input.value);
    at = 0;
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
  input.addEventListener("input", show);
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

export default function commandPalette({ data, parentElement, setTriggerValue }) {
  // A page that refreshes itself calls this again: an open dialog must stay open.
  const dialog = parentElement.palette || build(parentElement);
  dialog.entries = data.entries;
  dialog.steps = data.steps;
  dialog.choose = (entry) => setTriggerValue("chosen", entry);
  const listen = (event) => {
    if ((event.ctrlKey || event.metaKey) && !event.altKey && event.key.toLowerCase() === "k") {
      event.preventDefault();
      if (!dialog.open) dialog.open_();
    }
  };
  document.addEventListener("keydown", listen, true);
  return () => document.removeEventListener("keydown", listen, true);
}
