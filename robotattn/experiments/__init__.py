"""The seven attention experiments: each computes with the project's own attention code and judges what it measured.

e1 soft look-up, e2 learning to fetch, e3 why divide by sqrt(d), e4 position encodings, e5 residuals and norms,
e6 masks and the KV cache, e7 from cameras to tokens. `suite` runs them and writes JSON, figures and one page.
"""
