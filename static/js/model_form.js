// Shows the fields of the chosen source, proposes a served name, takes folders from the list.
(function () {
  "use strict";
  const { $, $$ } = window.Sardeenz;

  function showSource(form) {
    const chosen = $('input[name="source"]:checked', form);
    $$("[data-source]", form).forEach((part) => {
      part.hidden = !chosen || part.dataset.source !== chosen.value;
    });
  }

  function propose(form, id) {
    const name = form.elements.served_model_name;
    if (form.hasAttribute("data-existing") || (name.value && name.value !== name.dataset.proposed)) return;
    const text = id.replace(/\/+$/, "").split("/").pop().toLowerCase().replace(/[^a-z0-9._-]+/g, "-");
    name.value = text.replace(/^[^a-z0-9]+|[^a-z0-9]+$/g, "");
    name.dataset.proposed = name.value;
  }

  function adopt() {
    const form = $("[data-model-form]");
    if (!form || form.dataset.adopted) return;
    form.dataset.adopted = "1";
    showSource(form);
    const picked = $('input[name="catalogue_model"]:checked', form);
    if (picked) {
      const list = picked.closest(".catalogue");
      list.scrollTop = picked.closest(".pick").offsetTop - list.offsetTop - 60;
    }
    form.addEventListener("change", (event) => {
      if (event.target.name === "source") showSource(form);
      if (["catalogue_model", "hub_model", "local_model"].includes(event.target.name)) propose(form, event.target.value);
    });
    form.addEventListener("click", (event) => {
      const use = event.target.closest("[data-use-folder]");
      if (!use) return;
      const field = form.elements.local_model;
      field.value = use.dataset.useFolder;
      field.dispatchEvent(new Event("change", { bubbles: true }));
    });
  }

  document.addEventListener("htmx:afterSettle", adopt);
  adopt();
})();
