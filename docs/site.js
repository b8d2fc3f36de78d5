// A search for --num-gpus finds num-gpus: a dash before a word would leave the word out.
document.addEventListener("input", event => {
  const field = event.target
  if (field.matches("[data-md-component=search-query]")) field.value = field.value.replace(/(^|\s)-+/g, "$1")
}, true)
