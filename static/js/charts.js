// Stacked KV memory per GPU: filled from history at once, one point more with every reading.
(function () {
  "use strict";
  const { $, $$ } = window.Sardeenz;
  const GIB = 1073741824;
  const GAP_S = 6;
  const charts = new Map();

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function inkPattern(color, pattern) {
    const tile = document.createElement("canvas");
    tile.width = tile.height = 9;
    const pen = tile.getContext("2d");
    pen.globalAlpha = 0.55;
    pen.fillStyle = color;
    pen.fillRect(0, 0, 9, 9);
    pen.globalAlpha = 1;
    pen.fillStyle = css("--pattern-ink");
    if (pattern === 1) {
      pen.beginPath();
      pen.arc(4.5, 4.5, 2, 0, 7);
      pen.fill();
    }
    if (pattern === 2 || pattern === 3) pen.fillRect(0, 0, 2, 9);
    if (pattern === 3) pen.fillRect(0, 0, 9, 2);
    return pen.createPattern(tile, "repeat");
  }

  function fillOf(slot) {
    const color = css("--hue-" + (slot % 8));
    const pattern = Math.floor(slot / 8) % 4;
    return pattern ? inkPattern(color, pattern) : color + "8c";
  }

  // Where no readings were taken nothing is drawn: an empty point stands in every hole.
  function withGaps(data) {
    const { t, instances } = data;
    const steps = t.slice(1).map((at, place) => at - t[place]);
    const usual = steps.slice().sort((a, b) => a - b)[Math.floor(steps.length / 2)] || 1;
    for (let place = t.length - 1; place > 0; place -= 1) {
      if (t[place] - t[place - 1] <= Math.max(GAP_S, usual * 4)) continue;
      t.splice(place, 0, t[place - 1] + usual);
      instances.forEach((instance) => {
        instance.kv.splice(place, 0, null);
        instance.limit.splice(place, 0, null);
      });
    }
    return data;
  }

  class Chart {
    constructor(box) {
      this.box = box;
      this.window = Number(box.dataset.window) || 300;
      this.visible = false;
      this.data = null;
      this.plot = null;
      this.loading = false;
      this.loadedAt = 0;
      new ResizeObserver(() => this.resize()).observe(box);
    }

    async load() {
      if (this.loading) return;
      this.loading = true;
      try {
        const answer = await fetch(this.box.dataset.chart + "?window=" + this.window, {
          headers: { Accept: "application/json" },
        });
        if (!answer.ok) throw new Error(String(answer.status));
        this.data = withGaps(await answer.json());
        this.loadedAt = Date.now();
        this.draw();
      } catch {
        if (!this.plot) this.say("The history cannot be read now; it is asked for again with the next reading.");
      }
      this.loading = false;
    }

    say(text) {
      const note = document.createElement("div");
      note.className = "chart-empty";
      note.textContent = text;
      this.box.replaceChildren(note);
    }

    setWindow(seconds) {
      this.window = seconds;
      this.data = null;
      this.load();
    }

    get step() {
      return this.window <= 900 ? 1 : this.window / 900;
    }

    add(record, gpu) {
      if (!this.data || this.window > 3600) {
        if (Date.now() - this.loadedAt > 60000 && this.visible) this.load();
        return;
      }
      const t = this.data.t;
      const last = t.length ? t[t.length - 1] : 0;
      if (record.t <= last || record.t - last < this.step * 0.9) return;
      if (last && record.t - last > GAP_S + this.step) {
        this.load();
        return;
      }
      const here = new Map((gpu.instances || []).map((instance) => [instance.id, instance]));
      const known = new Set(this.data.instances.map((instance) => instance.id));
      if ([...here.keys()].some((id) => !known.has(id))) {
        this.load();
        return;
      }
      t.push(record.t);
      this.data.instances.forEach((instance) => {
        const now = here.get(instance.id);
        instance.kv.push(now ? now.used || 0 : 0);
        instance.limit.push(now && now.limit ? now.limit : null);
      });
      const from = record.t - this.window;
      let drop = 0;
      while (drop < t.length && t[drop] < from) drop += 1;
      if (drop) {
        t.splice(0, drop);
        this.data.instances.forEach((instance) => {
          instance.kv.splice(0, drop);
          instance.limit.splice(0, drop);
        });
      }
      if (!this.visible || document.hidden) return;
      if (this.plot) this.plot.setData(this.stack());
      else this.draw();
    }

    // uPlot draws series one over the other: the top of the stack first, then the lower ones over it.
    stack() {
      const { t, instances } = this.data;
      const sums = new Array(t.length).fill(0);
      const layers = [];
      const ceilings = [];
      instances.forEach((instance) => {
        ceilings.push(t.map((_, at) => (instance.limit[at] === null ? null : (sums[at] + instance.limit[at]) / GIB)));
        layers.push(t.map((_, at) => (instance.kv[at] === null ? null : (sums[at] += instance.kv[at]) / GIB)));
      });
      return [t, ...layers.reverse(), ...ceilings];
    }

    draw() {
      if (this.plot) this.plot.destroy();
      this.plot = null;
      const { t, instances, events } = this.data;
      this.notes(events);
      if (!t.length || !instances.length) {
        this.say(t.length ? "No KV memory in use in this window." : "No readings in this window yet.");
        return;
      }
      this.box.replaceChildren();
      const tall = this.box.classList.contains("chart-large");
      const grid = { stroke: css("--frame"), width: 0.5 };
      const axis = { stroke: css("--quiet"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      const top = instances.slice().reverse();
      const lined = new Set(this.linedInstances());
      const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit" });
      const seconds = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
      const times = (_plot, ticks, _axis, _space, step) =>
        ticks.map((tick) => (step < 60 ? seconds : clock).format(new Date(tick * 1000)));
      const options = {
        width: Math.max(120, this.box.clientWidth),
        height: tall ? 300 : 190,
        padding: [8, 8, 0, 0],
        cursor: { y: false, points: { show: false } },
        legend: { show: false },
        scales: {
          x: { time: true, range: (_plot, _low, high) => [high - this.window, high] },
          y: { range: () => [0, this.ceiling()] },
        },
        axes: [
          { ...axis, size: 28, space: tall ? 110 : 76, values: times },
          { ...axis, size: 42, values: (_plot, ticks) => ticks.map((tick) => String(tick)) },
        ],
        series: [
          {},
          ...top.map((instance) => ({
            label: instance.label,
            stroke: css("--hue-" + (instance.slot % 8)),
            fill: fillOf(instance.slot),
            width: 1,
            points: { show: false },
          })),
          ...instances.map((instance) => ({
            label: instance.label + " limit",
            stroke: css("--hue-" + (instance.slot % 8)),
            width: 1.5,
            dash: [6, 4],
            points: { show: false },
            show: lined.has(instance.id),
          })),
        ],
        bands: top.slice(0, -1).map((instance, at) => ({ series: [at + 1, at + 2], fill: fillOf(instance.slot) })),
        hooks: { draw: [(plot) => this.marks(plot)], setCursor: [(plot) => this.readout(plot.cursor.idx)] },
      };
      this.plot = new window.uPlot(options, this.stack(), this.box);
      const canvas = $("canvas", this.box);
      if (canvas) {
        canvas.setAttribute("role", "img");
        canvas.setAttribute("aria-label", this.sentence());
      }
    }

    // Lines are drawn for those who hold something worth a line: a dozen ceilings over empty layers say nothing.
    linedInstances() {
      const peak = (row) => row.reduce((high, value) => (value > high ? value : high), 0);
      const peaks = this.data.instances.map((instance) => peak(instance.kv));
      const total = peaks.reduce((sum, value) => sum + value, 0);
      return this.data.instances.filter((_, at) => peaks[at] > total * 0.03).map((instance) => instance.id);
    }

    // Room for the stack and for the limits near to it; a far limit does not flatten the picture.
    ceiling() {
      const [, ...rows] = this.stack();
      const count = this.data.instances.length;
      const lined = new Set(this.linedInstances());
      const most = (row) => row.reduce((high, value) => (value > high ? value : high), 0);
      const high = Math.max(0.1, ...rows.slice(0, count).map(most));
      const near = rows
        .slice(count)
        .filter((_, at) => lined.has(this.data.instances[at].id))
        .map(most)
        .filter((value) => value <= high * 1.6);
      return Math.max(high * 1.12, ...near.map((value) => value * 1.04));
    }

    readout(at) {
      const line = $('[data-chart-readout="' + this.box.dataset.chartId + '"]');
      if (!line) return;
      if (at === null || at === undefined) {
        line.textContent = "";
        return;
      }
      const parts = this.data.instances
        .filter((instance) => instance.kv[at])
        .map((instance) => {
          const limit = instance.limit[at] === null ? "" : " of " + (instance.limit[at] / GIB).toFixed(1);
          return instance.label + " " + (instance.kv[at] / GIB).toFixed(1) + limit;
        });
      line.textContent = new Date(this.data.t[at] * 1000).toLocaleTimeString() + "  " + parts.join(" · ");
    }

    marks(plot) {
      const pen = plot.ctx;
      const { left, top, width, height } = plot.bbox;
      pen.save();
      pen.globalAlpha = 0.6;
      let last = -100;
      pen.strokeStyle = css("--quiet");
      pen.fillStyle = css("--tblr-body-color");
      pen.setLineDash([3, 3]);
      (this.data.events || []).forEach((event) => {
        const x = plot.valToPos(event.t, "x", true);
        if (x < left || x > left + width || x - last < 7) return;
        last = x;
        pen.beginPath();
        pen.moveTo(x, top);
        pen.lineTo(x, top + height);
        pen.stroke();
        pen.beginPath();
        pen.moveTo(x - 5, top);
        pen.lineTo(x + 5, top);
        pen.lineTo(x, top + 8);
        pen.fill();
      });
      pen.restore();
    }

    notes(events) {
      const list = $('[data-chart-notes="' + this.box.dataset.chartId + '"]');
      if (!list) return;
      list.replaceChildren(
        ...(events || []).slice(-3).map((event) => {
          const line = document.createElement("li");
          line.textContent = "▽ " + new Date(event.t * 1000).toLocaleTimeString() + "  " + event.text;
          return line;
        })
      );
    }

    sentence() {
      const last = this.data.t.length - 1;
      const parts = this.data.instances.map(
        (instance) => instance.label + " " + ((instance.kv[last] || 0) / GIB).toFixed(1)
      );
      return "KV in use over time, GiB; now " + parts.join(", ") + ". The figures stand in the table linked below.";
    }

    resize() {
      if (this.plot && this.box.clientWidth) {
        this.plot.setSize({ width: this.box.clientWidth, height: this.plot.height });
      }
    }
  }

  const watcher = new IntersectionObserver(
    (entries) => {
      entries.forEach((entry) => {
        const chart = charts.get(entry.target);
        if (!chart) return;
        chart.visible = entry.isIntersecting;
        if (!chart.visible) return;
        if (!chart.data) chart.load();
        else if (chart.plot) chart.plot.setData(chart.stack());
      });
    },
    { rootMargin: "200px" }
  );

  function adopt() {
    $$("[data-chart]").forEach((box) => {
      if (charts.has(box)) return;
      charts.set(box, new Chart(box));
      watcher.observe(box);
    });
    for (const box of charts.keys()) if (!document.contains(box)) charts.delete(box);
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("[data-windows] [data-window]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    const group = link.closest("[data-windows]");
    const box = $('[data-chart-id="' + group.dataset.windows + '"]');
    const chart = charts.get(box);
    if (!chart || group.dataset.full) return;
    event.preventDefault();
    $$("[aria-current]", group).forEach((other) => other.removeAttribute("aria-current"));
    link.setAttribute("aria-current", "true");
    chart.setWindow(Number(link.dataset.window));
  });

  document.addEventListener("sz:sample", (event) => {
    const record = event.detail;
    record.gpus.forEach((gpu) => {
      for (const chart of charts.values()) {
        if (chart.box.dataset.chartGpu === gpu.uuid) chart.add(record, gpu);
      }
    });
  });
  // A change of an instance may be a mark of its chart: ask once when the changes have settled.
  let settling = null;
  const touched = new Set();
  document.addEventListener("sz:instances", (event) => {
    event.detail.forEach((id) => touched.add(id));
    clearTimeout(settling);
    settling = setTimeout(() => {
      for (const chart of charts.values()) {
        if (chart.visible && chart.data && chart.data.instances.some((instance) => touched.has(instance.id))) chart.load();
      }
      touched.clear();
    }, 2500);
  });
  document.addEventListener("sz:gap", () => {
    for (const chart of charts.values()) {
      if (chart.visible) chart.load();
      else chart.data = null;
    }
  });
  document.addEventListener("sz:theme", () => {
    for (const chart of charts.values()) if (chart.data) chart.draw();
  });
  document.addEventListener("htmx:afterSettle", adopt);
  adopt();
})();
