// Moves the parts of memory bars and the figures beside them when a reading arrives; walks the parts by keyboard.
(function () {
  "use strict";
  const { $, $$, gib } = window.Sardeenz;

  const percent = (value, scale) => Math.min(100, Math.max(0, (value / scale) * 100)).toFixed(3) + "%";
  const set = (element, name, value) => {
    if (element.getAttribute(name) !== value) element.setAttribute(name, value);
  };
  const text = (root, field, value) => {
    const element = root && root.querySelector('[data-f="' + field + '"]');
    if (element && element.textContent !== value) element.textContent = value;
  };

  function place(group, start, value, scale, words) {
    const x = percent(start, scale);
    const width = percent(value, scale);
    group.querySelectorAll("rect").forEach((rect) => {
      set(rect, "x", x);
      set(rect, "width", width);
    });
    const title = group.querySelector("title");
    if (title && words && title.textContent !== words) title.textContent = words;
  }

  const partWords = { weights: "weights and engine", used: "KV in use", idle: "KV mapped, idle" };

  function moveBar(svg, gpu, parts) {
    const total = gpu.total || Number(svg.dataset.total);
    let sum = gpu.other || 0;
    for (const id in parts) sum += parts[id].weights + parts[id].used + parts[id].idle;
    const scale = Math.max(total, sum, 1);
    let start = 0;
    const starts = {};
    $$("g.seg", svg).forEach((group) => {
      const { key, part } = group.dataset;
      if (part === "other") {
        place(group, start, gpu.other || 0, scale, "other processes " + gib(gpu.other || 0) + " GiB");
        start += gpu.other || 0;
      } else if (part === "free") {
        place(group, sum, Math.max(0, total - sum), scale, "free " + gib(Math.max(0, total - sum)) + " GiB");
      } else if (part in partWords) {
        const held = parts[key] || { weights: 0, used: 0, idle: 0, label: "" };
        const label = group.querySelector("title").textContent.split(": ").slice(0, -1).join(": ");
        place(group, start, held[part], scale, label ? label + ": " + partWords[part] + " " + gib(held[part]) + " GiB" : "");
        start += held[part];
        if (part === "weights") starts[key] = start;
      } else if (part === "promised") {
        const width = parseFloat(group.querySelector("rect").getAttribute("width")) || 0;
        place(group, start, (Math.min(width, 100 - (start / scale) * 100) / 100) * scale, scale, "");
      }
    });
    const top = Number(svg.dataset.top);
    $$("g.lane", svg).forEach((lane) => {
      const from = starts[lane.dataset.lane];
      if (from === undefined) return;
      const ends = { "lane-span": lane.dataset.limit, "lane-end": lane.dataset.limit, "lane-drop": lane.dataset.limit };
      $$("line", lane).forEach((line) => {
        const kind = line.classList[0];
        const to = from + Number(ends[kind] || lane.dataset[kind === "lane-floor" ? "floor" : "guarantee"]);
        set(line, "x2", percent(to, scale));
        set(line, "x1", kind === "lane-span" || kind === "lane-guarantee" ? percent(from, scale) : percent(to, scale));
      });
      const label = $("text", lane);
      if (label) {
        const to = from + Number(lane.dataset.limit);
        const left = to / scale > 0.89;
        set(label, "x", percent(left ? from : to, scale));
        set(label, "dx", left ? "-6" : "6");
        set(label, "text-anchor", left ? "end" : "start");
      }
    });
    return top;
  }

  function moveMeter(svg, held) {
    const scale = Math.max(Number(svg.dataset.scale), held.used + held.idle);
    const limit = Number(svg.dataset.limit);
    $$('[data-part="used"]', svg).forEach((rect) => set(rect, "width", percent(held.used, scale)));
    $$('[data-part="idle"]', svg).forEach((rect) => {
      set(rect, "x", percent(held.used, scale));
      set(rect, "width", percent(held.idle, scale));
    });
    const over = $('[data-part="over"]', svg);
    if (over) {
      set(over, "x", percent(limit, scale));
      set(over, "width", percent(Math.max(0, held.used + held.idle - limit), scale));
    }
  }

  const number = (value) => (value === null || value === undefined ? "–" : String(Math.round(value)));

  document.addEventListener("sz:sample", (event) => {
    const record = event.detail;
    const host = $('[data-host="' + CSS.escape(record.host) + '"]');
    if (host) {
      const age = host.querySelector('[data-f="age"]');
      if (age) {
        age.dataset.at = String(record.t * 1000);
        age.textContent = "0 s";
      }
    }
    record.gpus.forEach((gpu) => {
      const parts = {};
      (gpu.instances || []).forEach((instance) => {
        const used = instance.used || 0;
        const idle = instance.prealloc || 0;
        const weights =
          instance.baseline === null || instance.baseline === undefined
            ? Math.max(0, (instance.resident || 0) - used - idle)
            : instance.baseline;
        parts["i" + instance.id] = { weights, used, idle };
      });
      const ours = Object.values(parts).reduce((sum, part) => sum + part.weights + part.used + part.idle, 0);
      const used = ours + (gpu.other || 0);
      if (!gpu.error) {
        $$('[data-membar="' + CSS.escape(gpu.uuid) + '"]').forEach((svg) => moveBar(svg, gpu, parts));
      }
      $$('[data-gpu="' + CSS.escape(gpu.uuid) + '"]').forEach((card) => fillCard(card, gpu, parts, used));
    });
  });

  function fillCard(card, gpu, parts, used) {
    text(card, "util", number(gpu.util));
    text(card, "temp", number(gpu.temp));
    text(card, "power", number(gpu.power));
    text(card, "gpu-used", gib(used));
    text(card, "free", gib(Math.max(0, (gpu.total || 0) - used)));
    text(card, "other", gib(gpu.other || 0));
    (gpu.instances || []).forEach((instance) => {
      const held = parts["i" + instance.id];
      $$('[data-row="' + instance.id + '"]', card).forEach((row) => {
        text(row, "running", number(instance.running));
        text(row, "waiting", number(instance.waiting));
        text(row, "rate", number(instance.gen_tokens_per_s));
        text(row, "used", gib(held.used));
        text(row, "idle", gib(held.idle));
        text(row, "mapped", gib(held.used + held.idle));
        text(row, "weights", gib(held.weights));
        $$("[data-kv]", row).forEach((svg) => moveMeter(svg, held));
      });
    });
  }

  setInterval(() => {
    if (document.hidden) return;
    $$('[data-f="age"][data-at]').forEach((element) => {
      const at = isNaN(element.dataset.at) ? Date.parse(element.dataset.at) : Number(element.dataset.at);
      if (at) element.textContent = window.Sardeenz.span((Date.now() - at) / 1000);
    });
  }, 1000);

  // --- one stop of the Tab key per bar, arrows walk its parts --------------------------------------------------

  function readout(group) {
    const svg = group.closest("svg");
    const line = svg && $('[data-readout="' + CSS.escape(svg.dataset.membar) + '"]');
    const title = group.querySelector("title");
    if (line && title) line.textContent = title.textContent;
  }

  document.addEventListener("keydown", (event) => {
    const group = event.target.closest && event.target.closest("g.seg");
    if (!group || !["ArrowRight", "ArrowLeft", "Home", "End", "Enter"].includes(event.key)) return;
    const all = $$("g.seg", group.closest("svg")).filter((seg) => {
      const rect = seg.querySelector("rect");
      return parseFloat(rect.getAttribute("width")) > 0;
    });
    const here = all.indexOf(group);
    if (event.key === "Enter") {
      const id = (group.dataset.key || "").replace(/^i/, "");
      if (/^\d+$/.test(id)) window.location.assign("/instances/" + id + "/");
      return;
    }
    event.preventDefault();
    const next =
      event.key === "Home" ? 0 : event.key === "End" ? all.length - 1 : here + (event.key === "ArrowRight" ? 1 : -1);
    const goal = all[Math.max(0, Math.min(all.length - 1, next))];
    if (!goal) return;
    group.setAttribute("tabindex", "-1");
    goal.setAttribute("tabindex", "0");
    goal.focus();
  });
  ["focusin", "mouseover"].forEach((kind) =>
    document.addEventListener(kind, (event) => {
      const group = event.target.closest && event.target.closest("g.seg");
      if (group) readout(group);
    })
  );
})();
