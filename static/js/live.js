// One WebSocket per page: readings and "this changed" notes, with polling when it cannot be had.
(function () {
  "use strict";
  const { $, $$, refetch } = window.Sardeenz;
  const wantsSamples = document.body.dataset.live === "samples";
  const badge = $("[data-link-state]");
  const banner = $("#link-banner");

  const FRAME_LIMIT_MS = 12000; // the server sends at least an empty frame every 5 s
  const POLL_MS = 5000;
  const BACKOFF_MS = [500, 1000, 2000, 4000, 8000, 15000];

  let socket = null;
  let attempts = 0;
  let lastFrame = 0;
  let waitingForPaint = false;
  let hadLink = false;
  let poller = null;
  let watchdog = null;
  let retry = null;
  let closed = false;

  const STATES = {
    live: ["Live", "ok", "circle-check", ""],
    reconnecting: ["Reconnecting", "warn", "plug-connected-x", ""],
    polling: ["Polling every 5 s", "warn", "refresh", "No live link: the page asks for news every 5 seconds and goes on trying."],
    broker: ["Broker away", "bad", "database-off", "The message broker (Redis/Valkey) does not answer. Reading works; acts are refused until it is back."],
    gone: ["No connection", "bad", "plug-x", "The server does not answer. Figures on this page are old; it goes on trying."],
    out: ["Signed out", "bad", "lock", "Your session has ended or your rights have changed. Log in again to go on."],
  };
  let shown = "";

  function show(name) {
    if (shown === name || !badge) return;
    shown = name;
    const [text, tone, glyph, sentence] = STATES[name];
    badge.className = "link-state js-only tone-" + tone;
    const icon = document.createElement("i");
    icon.className = "ti ti-" + glyph;
    icon.setAttribute("aria-hidden", "true");
    const words = document.createElement("span");
    words.textContent = text;
    badge.replaceChildren(icon, words);
    if (banner) {
      banner.hidden = !sentence;
      banner.className = "banner tone-" + tone;
      const box = banner.firstElementChild;
      box.textContent = sentence;
      if (name === "out") {
        const link = document.createElement("a");
        link.href = "/login/?next=" + encodeURIComponent(location.pathname + location.search);
        link.textContent = " Log in";
        box.append(link);
      }
    }
    document.documentElement.dataset.link = name;
  }

  // --- what arrives --------------------------------------------------------------------------------------------

  function takeFrame(frame) {
    (frame.samples || []).forEach((record) => {
      document.dispatchEvent(new CustomEvent("sz:sample", { detail: record }));
    });
    const known = new Set($$("[data-row]").map((row) => row.dataset.row));
    let unknown = false;
    (frame.instances || []).forEach((id) => {
      if (known.has(String(id))) refetch('[data-row="' + id + '"]');
      else unknown = true;
      refetch('[data-instance="' + id + '"]');
    });
    if ((frame.instances || []).length) {
      document.dispatchEvent(new CustomEvent("sz:instances", { detail: frame.instances.map(Number) }));
    }
    if (unknown || frame.gpus) refetch('[data-refetch~="board"]');
    if (frame.models) refetch('[data-refetch~="models"]');
    if ((frame.instances || []).length) refetch('[data-refetch~="attention"]');
    if ((frame.operations || []).length) {
      refetch("#operations-count");
      if ($("#operations-menu[open]")) refetch("#operations-tray");
      refetch('[data-refetch~="operations"]');
      frame.operations.forEach((id) => refetch('[data-operation="' + id + '"]'));
    }
  }

  // After a gap nothing on the page can be trusted: fetch the snapshot of everything that is shown.
  function afterGap() {
    const boards = $$('[data-refetch~="board"], [data-refetch~="models"], [data-refetch~="operations"]');
    if (boards.length) boards.forEach((board) => window.htmx && window.htmx.trigger(board, "refetch"));
    else refetch("[data-row]");
    refetch("[data-instance]");
    refetch('[data-refetch~="attention"]');
    refetch("#operations-count");
    document.dispatchEvent(new CustomEvent("sz:gap"));
  }

  // --- the socket ----------------------------------------------------------------------------------------------

  function connect() {
    clearTimeout(retry);
    if (closed) return;
    const address = new URL("/ws/live", location.href);
    address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    if (wantsSamples) address.searchParams.set("samples", "1");
    let mine;
    try {
      mine = new WebSocket(address);
    } catch {
      again();
      return;
    }
    socket = mine;
    mine.addEventListener("message", (event) => {
      if (mine !== socket) return;
      const frame = JSON.parse(event.data);
      lastFrame = Date.now();
      if (attempts > 0 || poller) {
        const gap = hadLink;
        attempts = 0;
        stopPolling();
        if (gap) afterGap();
      }
      hadLink = true;
      if (shown === "broker" && frame.broker !== false) afterGap();
      show(frame.broker === false ? "broker" : "live");
      waitingForPaint = true;
      requestAnimationFrame(() => {
        waitingForPaint = false;
        takeFrame(frame);
        if (mine.readyState === WebSocket.OPEN) mine.send(JSON.stringify({ ack: frame.n }));
      });
    });
    mine.addEventListener("close", (event) => {
      if (mine !== socket) return;
      socket = null;
      if (event.code === 4401 || event.code === 4403) {
        signedOut();
        return;
      }
      again();
    });
  }

  function again() {
    attempts += 1;
    const wait = BACKOFF_MS[Math.min(attempts - 1, BACKOFF_MS.length - 1)];
    if (attempts > 2) startPolling();
    else show("reconnecting");
    retry = setTimeout(connect, wait * (0.75 + Math.random() / 2));
  }

  function signedOut() {
    closed = true;
    stopPolling();
    show("out");
  }

  // A half-open socket shows old values as live: no frame for long means the link is gone.
  watchdog = setInterval(() => {
    if (!socket || document.hidden || waitingForPaint) return;
    if (socket.readyState === WebSocket.OPEN && lastFrame && Date.now() - lastFrame > FRAME_LIMIT_MS) {
      const dead = socket;
      socket = null;
      dead.close();
      again();
    }
  }, 2000);

  // --- polling -------------------------------------------------------------------------------------------------

  function startPolling() {
    if (poller) return;
    show("polling");
    poll();
    poller = setInterval(poll, POLL_MS);
  }

  function stopPolling() {
    clearInterval(poller);
    poller = null;
  }

  let versions = null;
  async function poll() {
    if (document.hidden) return;
    let answer;
    try {
      answer = await fetch("/live/snapshot/" + (wantsSamples ? "?samples=1" : ""), {
        headers: { Accept: "application/json" },
        signal: AbortSignal.timeout(4500),
      });
    } catch {
      show("gone");
      return;
    }
    if (answer.status === 401 || answer.status === 403) {
      signedOut();
      return;
    }
    if (!answer.ok) {
      show("gone");
      return;
    }
    const state = await answer.json();
    if (!poller) return;
    show(state.broker ? "polling" : "broker");
    const changed = [];
    if (versions) {
      for (const [id, version] of Object.entries(state.instances)) {
        if (versions.instances[id] !== version) changed.push(id);
      }
      for (const id of Object.keys(versions.instances)) if (!(id in state.instances)) changed.push(id);
    }
    const operations = versions && versions.operations !== state.operations ? [0] : [];
    if (!versions) afterGap();
    versions = state;
    takeFrame({ samples: state.samples, instances: changed, operations });
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden || closed) return;
    lastFrame = Date.now();
    if (!socket) {
      attempts = Math.min(attempts, 1);
      connect();
    }
  });
  window.addEventListener("pagehide", () => {
    closed = true;
    clearInterval(watchdog);
    if (socket) socket.close();
  });
  window.addEventListener("pageshow", (event) => {
    if (!event.persisted) return;
    window.location.reload();
  });

  connect();
})();
