"""The live page: HTML, one style sheet and plain JavaScript modules, served as they are.

No build step, no package and no request to another server. Text of clients is only ever set as text, never as markup.
"""
