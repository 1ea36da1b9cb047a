"""What runs inside a rank; from here on torch may be imported."""
