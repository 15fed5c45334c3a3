"""Plugins for training frameworks. Workers import single modules from here, so this one imports nothing."""
