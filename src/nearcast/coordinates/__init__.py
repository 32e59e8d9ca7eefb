"""Network coordinates: where a node is in a space whose distances are round-trip times (Vivaldi, enhanced). Pure."""
