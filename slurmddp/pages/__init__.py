"""The parts that all HTML pages share: frame, tables and the style of pictures."""
