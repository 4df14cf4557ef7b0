"""From records to report.json, its findings, the pictures and the page."""
