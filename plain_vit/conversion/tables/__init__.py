"""What every source is built from: rows that map names and are read both ways, inference of settings, pixels."""
