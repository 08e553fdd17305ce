// Runs before the first paint: a reader who has chosen nothing gets the system's theme.
(function () {
  "use strict";
  const root = document.documentElement;
  root.classList.add("js");
  if (root.dataset.themeChoice === "auto" && window.matchMedia("(prefers-color-scheme: dark)").matches) {
    root.dataset.bsTheme = "dark";
  }
})();
