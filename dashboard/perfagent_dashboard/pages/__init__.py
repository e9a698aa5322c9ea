"""One module a page. `layout()` gives the skeleton; its empty containers are filled by the script asset of the same
name."""
