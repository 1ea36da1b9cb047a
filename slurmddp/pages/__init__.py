"""The parts that all pages share: the frame, the table, the look of pictures."""
