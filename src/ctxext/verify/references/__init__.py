"""Every method worked out the plain way; see README.md in this folder."""
