"use strict";
(() => {
  const token = new URLSearchParams(location.search).get("token");
  const list = document.getElementById("run-list");
  const shown = document.getElementById("run");
  const EVERY_MS = 2000;
  let chosen = null, version = "", isAsking = false;

  async function ask(path, values = {}) {
    const query = new URLSearchParams({ token, ...values });
    const answer = await fetch(`${path}?${query}`);
    if (!answer.ok) throw new Error(`${answer.status}`);
    return answer.json();
  }

  function age(seconds) {
    for (const [size, unit] of [[86400, "d"], [3600, "h"], [60, "min"]]) {
      if (seconds >= size) return `${Math.floor(seconds / size)} ${unit} ago`;
    }
    return `${seconds} s ago`;
  }

  function choose(name) {
    chosen = name;
    version = "";
    update();
  }

  function fill(runs) {
    document.getElementById("no-runs").hidden = runs.length > 0;
    chosen ??= runs[0]?.name ?? null;
    list.replaceChildren(...runs.map((run) => {
      const row = document.createElement("tr");
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = run.name;
      button.addEventListener("click", () => choose(run.name));
      row.insertCell().append(button);
      for (const text of [run.algo, run.task, run.step ?? "–", age(run.age_s)]) row.insertCell().textContent = text;
      row.className = run.name === chosen ? "chosen" : "";
      return row;
    }));
  }

  async function update() {
    if (isAsking || document.hidden) return;
    isAsking = true;
    const lost = document.getElementById("runs-lost");
    try {
      fill(await ask("runs"));
      if (chosen !== null) {
        const name = chosen;
        const found = await ask("run", { name, version });
        if (found.html !== undefined && name === chosen) shown.innerHTML = found.html;
        if (name === chosen) version = found.version;
      }
      lost.hidden = true;
    } catch {
      lost.hidden = false;
    }
    isAsking = false;
  }

  setInterval(update, EVERY_MS);
  document.addEventListener("visibilitychange", update);
  update();
})();
