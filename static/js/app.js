// Dialogs, notices, menus, times and the theme switch. Every page works without this file.
(function () {
  "use strict";
  const $ = (selector, root) => (root || document).querySelector(selector);
  const $$ = (selector, root) => Array.from((root || document).querySelectorAll(selector));

  // --- times: ISO in the markup, the reader's zone and language on the screen ----------------------------------

  const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit" });
  const full = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const day = new Intl.DateTimeFormat(undefined, { dateStyle: "medium" });

  function span(seconds) {
    const s = Math.max(0, seconds);
    if (s < 60) return Math.round(s) + " s";
    if (s < 3600) return Math.round(s / 60) + " min";
    if (s < 48 * 3600) return Math.round(s / 3600) + " h";
    return Math.round(s / 86400) + " d";
  }

  function showTime(element) {
    const at = new Date(element.dateTime);
    if (isNaN(at)) return;
    const age = (Date.now() - at) / 1000;
    const kind = element.dataset.show;
    let text;
    if (kind === "for") text = span(age);
    else if (kind === "ago") text = age < 0 ? "in " + span(-age) : span(age) + " ago";
    else if (kind === "date") text = day.format(at);
    else text = at.toDateString() === new Date().toDateString() ? clock.format(at) : full.format(at);
    if (element.textContent !== text) element.textContent = text;
    if (element.title && !element.dataset.titled) {
      element.title = full.format(at);
      element.dataset.titled = "1";
    }
    element.dataset.young = age < 90 ? "1" : "";
  }

  let beat = 0;
  function tickTimes() {
    if (document.hidden) return;
    beat += 1;
    const wanted = beat % 20 === 1 ? "time[data-show]" : 'time[data-show][data-young="1"]';
    $$(wanted).forEach(showTime);
  }

  // --- notices -------------------------------------------------------------------------------------------------

  function toast(text, tone) {
    const box = $("#toasts");
    if (!box || !text) return;
    const line = document.createElement("div");
    line.className = "toast-line tone-" + (tone || "info");
    const words = document.createElement("span");
    words.textContent = text;
    const close = document.createElement("button");
    close.type = "button";
    close.className = "btn-close";
    close.setAttribute("aria-label", "Dismiss");
    close.addEventListener("click", () => line.remove());
    line.append(words, close);
    box.append(line);
    while (box.children.length > 4) box.firstElementChild.remove();
    if (tone !== "bad") setTimeout(() => line.remove(), 8000);
  }

  // --- dialog --------------------------------------------------------------------------------------------------

  const dialog = $("#dialog");
  let opener = null;

  function closeDialog() {
    if (dialog && dialog.open) dialog.close();
  }

  if (dialog) {
    dialog.addEventListener("close", () => {
      dialog.replaceChildren();
      if (opener && document.contains(opener)) opener.focus();
      else if (opener && opener.id && document.getElementById(opener.id)) document.getElementById(opener.id).focus();
      opener = null;
    });
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog) closeDialog();
    });
  }

  document.addEventListener("htmx:afterSwap", (event) => {
    if (!dialog || event.detail.target !== dialog || !dialog.children.length) return;
    if (!dialog.open) {
      opener = document.activeElement;
      dialog.showModal();
    }
    const first = $("[aria-invalid=true]", dialog) || $("[autofocus]", dialog);
    if (first) first.focus();
  });

  // A form that came back with errors: to the first of them.
  document.addEventListener("htmx:afterSettle", (event) => {
    const root = event.detail.elt;
    if (!root || !root.matches || !root.matches("form, #model-form")) return;
    const wrong = $("[aria-invalid=true]", root) || $(".alert-danger", root);
    if (!wrong) return;
    const fold = wrong.closest("details");
    if (fold) fold.open = true;
    wrong.scrollIntoView({ block: "center" });
    if (wrong.focus) wrong.focus();
  });

  // Links that open a question in the dialog, and buttons that act at once: what they do without this file, quicker.
  document.addEventListener("click", (event) => {
    if (!window.htmx || event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    const asks = event.target.closest("a[data-dialog]");
    if (asks) {
      event.preventDefault();
      asks.closest("details.menu")?.removeAttribute("open");
      window.htmx.ajax("GET", asks.getAttribute("href"), { source: asks, target: "#dialog", swap: "innerHTML" });
    }
    const acts = event.target.closest("button[data-act]");
    if (acts) {
      event.preventDefault();
      if (acts.disabled) return;
      acts.disabled = true;
      window.htmx
        .ajax("POST", acts.getAttribute("formaction"), { source: acts, target: acts, swap: "none" })
        .finally(() => (acts.disabled = false));
    }
  });

  document.addEventListener("click", (event) => {
    const closer = event.target.closest("[data-close]");
    if (closer && dialog && dialog.open && dialog.contains(closer)) {
      event.preventDefault();
      closeDialog();
    }
  });

  // --- answers of the server -----------------------------------------------------------------------------------

  let told = false;
  document.addEventListener("sz:toast", (event) => {
    told = true;
    toast(event.detail.text, event.detail.tone);
  });
  document.addEventListener("sz:close", closeDialog);
  document.addEventListener("sz:changed", (event) => {
    const ids = event.detail.instances || [];
    ids.forEach((id) => refetch('[data-row="' + id + '"]'));
    (event.detail.names || []).forEach((name) => refetch('[data-refetch~="' + name + '"]'));
  });
  document.addEventListener("sz:go", (event) => {
    window.location.assign(event.detail.to || event.detail.value);
  });
  document.addEventListener("htmx:beforeRequest", () => {
    told = false;
  });
  document.addEventListener("htmx:responseError", (event) => {
    const status = event.detail.xhr.status;
    if (told) return;
    if (status === 403) toast("You may not do that, or you have been logged out. Reload the page.", "bad");
    else if (status !== 404) toast("The server could not do that (" + status + "). Nothing was changed.", "bad");
  });
  document.addEventListener("htmx:sendError", (event) => {
    if (event.detail.elt && event.detail.elt.closest("[data-quiet]")) return;
    if (event.detail.requestConfig && event.detail.requestConfig.verb === "get") return;
    toast("The server does not answer. Nothing was changed; try again when the page is live.", "bad");
  });

  function refetch(selector) {
    $$(selector).forEach((element) => {
      if (window.htmx && element.hasAttribute("hx-get")) window.htmx.trigger(element, "refetch");
    });
  }

  // Keep an open menu and the focus through a swap of its row.
  let openMenus = [];
  document.addEventListener("htmx:beforeSwap", (event) => {
    const root = event.detail.target;
    openMenus = root && root.querySelectorAll ? $$("details[open][id]", root).map((menu) => menu.id) : [];
  });
  document.addEventListener("htmx:afterSettle", (event) => {
    openMenus.forEach((id) => {
      const menu = document.getElementById(id);
      if (menu) menu.open = true;
    });
    openMenus = [];
    const root = event.detail.elt || document;
    $$("time[data-show]", root.querySelectorAll ? root : document).forEach(showTime);
  });

  // --- menus ---------------------------------------------------------------------------------------------------

  document.addEventListener("click", (event) => {
    $$("details.menu[open]").forEach((menu) => {
      if (!menu.contains(event.target)) menu.open = false;
    });
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    $$("details.menu[open]").forEach((menu) => {
      menu.open = false;
      const handle = $("summary", menu);
      if (handle && menu.contains(document.activeElement)) handle.focus();
    });
  });
  const tray = $("[data-operations-menu]");
  if (tray) tray.addEventListener("toggle", () => tray.open && refetch("#operations-tray"));

  // --- theme ---------------------------------------------------------------------------------------------------

  document.addEventListener("submit", (event) => {
    if (!event.target.matches("[data-theme-form]") || !event.submitter) return;
    event.preventDefault();
    const chosen = event.submitter.value;
    document.cookie = "theme=" + chosen + ";path=/;max-age=31536000;samesite=lax";
    const root = document.documentElement;
    root.dataset.themeChoice = chosen;
    const dark = chosen === "dark" || (chosen === "auto" && matchMedia("(prefers-color-scheme: dark)").matches);
    root.dataset.bsTheme = dark ? "dark" : "light";
    document.dispatchEvent(new CustomEvent("sz:theme"));
    $$("details.menu[open]").forEach((menu) => (menu.open = false));
  });

  // --- small helpers of single pages ---------------------------------------------------------------------------

  // A range and a text field that say the same size; the text is what is sent.
  document.addEventListener("input", (event) => {
    const range = event.target.closest("[data-size-range]");
    if (range) {
      const text = document.getElementById(range.dataset.sizeRange);
      text.value = (Number(range.value) / 1024).toFixed(2).replace(/\.?0+$/, "") + "G";
      text.dispatchEvent(new Event("change", { bubbles: true }));
    }
    const filter = event.target.closest("[data-filter]");
    if (filter) {
      const wanted = filter.value.trim().toLowerCase();
      $$(filter.dataset.filter).forEach((row) => {
        row.hidden = wanted !== "" && !row.textContent.toLowerCase().includes(wanted);
      });
    }
  });
  document.addEventListener("click", (event) => {
    const copier = event.target.closest("[data-copy]");
    if (!copier) return;
    const source = document.getElementById(copier.dataset.copy);
    if (source && navigator.clipboard) {
      navigator.clipboard.writeText(source.textContent.trim()).then(() => toast("Copied.", "ok"));
    }
  });

  // A log sticks to its end unless the reader has scrolled up; what was looked for stays looked for.
  const seen = new WeakMap();
  const logIn = (target) => (target && target.querySelector ? target.querySelector(".log") : null);
  document.addEventListener("htmx:beforeSwap", (event) => {
    const log = logIn(event.detail.target);
    if (!log) return;
    const stuck = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
    seen.set(event.detail.target, { stuck, top: log.scrollTop });
  });
  document.addEventListener("htmx:afterSwap", (event) => {
    const log = logIn(event.detail.target);
    const before = log && seen.get(event.detail.target);
    if (!before) return;
    const filter = $("#log-filter");
    if (filter && filter.value) filter.dispatchEvent(new Event("input", { bubbles: true }));
    log.scrollTop = before.stuck ? log.scrollHeight : before.top;
  });

  document.addEventListener("DOMContentLoaded", () => {
    $$("time[data-show]").forEach(showTime);
    $$(".log").forEach((log) => (log.scrollTop = log.scrollHeight));
    setInterval(tickTimes, 1000);
  });

  window.Sardeenz = { $, $$, toast, refetch, span, gib: (bytes) => (bytes / 1073741824).toFixed(1) };
})();
