"""The measurements that a recipe can ask for."""
