"""The loader: from settings and declarations to decisions, seams and an audit."""
