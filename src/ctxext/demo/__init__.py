"""The small checkpoint that ships with the package, and the text it was trained on."""
