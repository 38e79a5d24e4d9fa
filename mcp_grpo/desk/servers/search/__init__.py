"""Web search: pages that match, the text of a page, and a short answer with its source."""
