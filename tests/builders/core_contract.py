"""A contract of import-linter: no module of the core imports one of a feature (`rubberband/features.py`)."""

from __future__ import annotations

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output
from importlinter.application import contract_utils
from importlinter.application.contract_utils import AlertLevel

from rubberband.features import feature_of


class CoreContract(Contract):
    """Imports within functions count. `ignore_imports` has those that are left."""

    type_name = "core"
    ignore_imports = fields.SetField(subfield=fields.ImportExpressionField(), required=False)

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Return the imports of features by the core."""
        contract_utils.remove_ignored_imports_and_report(graph, self.ignore_imports, AlertLevel.ERROR)
        core = [module for module in sorted(graph.modules) if feature_of(module) is None]
        pairs = [(each, found) for each in core for found in sorted(graph.find_modules_directly_imported_by(each))]
        wrong = [(each, found) for each, found in pairs if feature_of(found) is not None]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports."""
        for importer, imported in check.metadata["wrong"]:
            output.print_error(f"{importer} imports {imported}, of {feature_of(imported).name}")
