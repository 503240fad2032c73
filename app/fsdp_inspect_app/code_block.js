// Show code, and copy it.

const COPIED_MS = 1500;

export default function showCode({ data, parentElement }) {
  const block = document.createElement("pre");
  const code = document.createElement("code");
  const copy = document.createElement("button");
  block.className = data.language === "diff" ? "code-block code-diff" : "code-block";
  block.tabIndex = 0;
  code.append(...(data.language === "diff" ? diffOf(data.text) : [data.text]));
  copy.type = "button";
  copy.textContent = "Copy";
  copy.addEventListener("click", async () => {
    await write(data.text);
    copy.textContent = "Copied";
    setTimeout(() => (copy.textContent = "Copy"), COPIED_MS);
  });
  block.append(code);
  const frame = document.createElement("div");
  frame.className = "code-frame";
  frame.append(block, copy);
  parentElement.replaceChildren(frame);
}

// The lines of a diff, each marked with its sign.
function diffOf(text) {
  return text.split("\n").map((line) => {
    const shown = document.createElement("span");
    shown.className = { "+": "code-added", "-": "code-removed" }[line[0]] ?? "";
    shown.textContent = `${line}\n`;
    return shown;
  });
}

// The clipboard is there on https and localhost only.
async function write(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = document.createElement("textarea");
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
