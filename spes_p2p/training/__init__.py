"""From text to updates and back to the agreed state: trainer, codecs, and the arithmetic that must agree to the bit."""
