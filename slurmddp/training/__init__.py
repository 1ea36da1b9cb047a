"""The code of a rank; from here on torch may be imported."""
