"""`python -m audit_cases`, in `tests`: print the table of docs/audit-cases.md."""

from audit_cases import format_cases

print(format_cases())
