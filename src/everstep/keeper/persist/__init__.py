"""Makes captured bases durable: writes, commits and audits them.

Read ``local`` first (one base after another), then ``persist`` (one base: files, marker, manifest).
"""
