"""Tests of the controller, which share three workers while this package runs."""
