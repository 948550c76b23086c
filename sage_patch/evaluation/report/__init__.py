"""The one page that shows results files: sections of blocks, every number traced to its file."""
