"""Loader: decides each overlay from settings and source, installs its seams, and reports an audit."""
